"""The options of `qwen3-tts speak`, which is also `python generate.py`: their names, defaults and --help."""

import argparse
from pathlib import Path

from qwen3_tts_cuda_graphs.cli.voice_options import DESCRIPTION, Speakers
from qwen3_tts_cuda_graphs.common.choices import one_of
from qwen3_tts_cuda_graphs.common.formats import EXTENSIONS, RATES, TELEPHONE_RATE
from qwen3_tts_cuda_graphs.common.model_names import model_name
from qwen3_tts_cuda_graphs.common.parser import Parser
from qwen3_tts_cuda_graphs.common.published import CLONING_MODEL, MODELS, PRESET_MODEL
from qwen3_tts_cuda_graphs.common.voice_files import REFERENCE_SILENCE
from qwen3_tts_cuda_graphs.prompts.cut import FRAMES_PER_TOKEN, MAX_SEQ_LEN, MIN_FRAME_LIMIT, PAUSE

OUTPUT = Path("speech.wav")
EXAMPLES = """examples:
  qwen3-tts speak "Hello!"                                            a preset voice, to speech.wav
  qwen3-tts speak "Hello!" --voice ryan --speed 1.2 --play            another one, faster, heard at once
  qwen3-tts speak --text "Hello!" --ref-audio voice.wav               the voice of a recording
  qwen3-tts speak --text "Hello!" --model 1.7B-VoiceDesign --instruct "an old sailor"
  qwen3-tts speak --text-file book.txt --join --output book.mp3       a text of any length
  qwen3-tts speak --text-file play.txt --script --join --subtitles play.srt    lines of several voices
  llm | qwen3-tts speak --text - --play                               a text that is still being written
"""


def make_parser() -> Parser:
    parser = Parser(
        prog="qwen3-tts speak",
        description="Speak with Qwen3-TTS.",
        epilog=EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    voice = parser.add_argument_group("voice")
    voice.add_argument(
        "--model",
        type=model_name,
        help=f"{', '.join(MODELS)}, a hub id or a folder; default: {PRESET_MODEL}, or {CLONING_MODEL} to clone a voice",
    )
    voice.add_argument(
        "--speaker",
        "--voice",
        nargs="+",
        action=Speakers,
        help="Base: a speaker.pt, default: the one in the model's folder, or several to mix; CustomVoice: a name, "
        "default: the first of --list-speakers. NAME=FILE, of a speaker.pt or a recording: a voice of the script",
    )
    voice.add_argument("--weights", type=float, nargs="+", help="of several speaker.pt; default: equal")
    voice.add_argument("--ref-audio", "--ref_audio", type=Path, help="Base: a recording to clone")
    voice.add_argument("--ref-text", "--ref_text", help="its transcript: clones the manner of speaking, too")
    voice.add_argument(
        "--no-append-silence",
        action="store_true",
        help=f"do not add {REFERENCE_SILENCE} s of silence between the recording and the speech",
    )
    voice.add_argument("--instruct", help=f"CustomVoice: how to speak; VoiceDesign: the voice, default: {DESCRIPTION}")
    voice.add_argument("--list-speakers", action="store_true", help="print the names for --speaker, and end")
    voice.add_argument("--list-languages", action="store_true", help="print the names for --language, and end")

    text = parser.add_argument_group("text")
    text.add_argument("words", nargs="*", metavar="TEXT", help="the same as --text")
    text.add_argument(
        "--text", help="what to say, one utterance per line; - reads stdin, with --stream while it is being written"
    )
    text.add_argument("--text-file", type=Path, help="a text of any length; long lines are cut at sentence ends")
    text.add_argument(
        "--paragraphs", action="store_true", help="utterances end at empty lines, as in books with wrapped lines"
    )
    text.add_argument("--script", action="store_true", help="a play: lines may begin with a voice, as in Aiden: Hello!")
    text.add_argument("--plain", action="store_true", help="[pause 1] and other tags are words")
    text.add_argument("--lexicon", type=Path, help="a file of lines word<TAB>how to say it")
    text.add_argument("--language", default="Auto", help="a name or a code like en; default: %(default)s")
    text.add_argument(
        "--non-streaming-mode",
        action=argparse.BooleanOptionalAction,
        help="put the whole text into the prompt, or feed it frame by frame; default: as upstream for this model",
    )

    audio = parser.add_argument_group("audio")
    audio.add_argument(
        "--output",
        "-o",
        type=Path,
        help="the file to write: .wav, .flac, .ogg, .opus, .mp3, .pcm, .ulaw or .alaw; - for stdout; default: "
        f"{OUTPUT}, or if that is there speech-2.wav and so on; with --play none",
    )
    audio.add_argument(
        "--format",
        help=f"{', '.join(EXTENSIONS)}, also with a rate as in pcm_16000; default: by the extension of --output",
    )
    audio.add_argument(
        "--sample-rate",
        type=int,
        help=f"{one_of(RATES)}; default: the model's 24000, or {TELEPHONE_RATE} for mulaw and alaw",
    )
    audio.add_argument("--subtitles", type=Path, help=".srt, .vtt or .json: when each part is heard")
    audio.add_argument("--join", action="store_true", help="several utterances in one file")
    audio.add_argument("--pause", type=float, help=f"seconds between them; default: {PAUSE}")
    audio.add_argument(
        "--speed", type=float, default=1.0, help="0.25 to 4, with the same pitch; needs PyAV; default: %(default)s"
    )
    audio.add_argument(
        "--resume", action="store_true", help="keep what an interrupted run of the same command has spoken"
    )
    audio.add_argument(
        "--limit-speech",
        action=argparse.BooleanOptionalAction,
        default=True,
        help=f"stop speech that does not end: after {MIN_FRAME_LIMIT} frames, or {FRAMES_PER_TOKEN} per token of text",
    )
    audio.add_argument(
        "--retry", type=int, default=0, help="speak it again, with another seed, at most so often; default: 0"
    )
    audio.add_argument("--stream", action="store_true", help="write the audio while it is generated")
    audio.add_argument("--play", action="store_true", help="play it, too, while it is generated; implies --stream")

    sampling = parser.add_argument_group(
        "sampling of the first code; the other 15 keep the model's settings (default: its generation_config.json)"
    )
    sampling.add_argument("--seed", type=int, help="the same seed gives the same speech")
    sampling.add_argument("--temperature", type=float)
    sampling.add_argument("--top-k", type=int)
    sampling.add_argument("--top-p", type=float)
    sampling.add_argument("--repetition-penalty", type=float)

    machine = parser.add_argument_group("machine")
    machine.add_argument(
        "--max-seq-len",
        default=MAX_SEQ_LEN,
        type=int,
        help="positions for prompt and speech, 12.5 per second; default: %(default)s",
    )
    machine.add_argument("--device", help="cuda, cuda:1, cpu; default: cuda where there is one")
    machine.add_argument(
        "--dtype", choices=["bfloat16", "float16", "float32"], help="default: bfloat16, on a CPU float32"
    )
    machine.add_argument(
        "--fused",
        action=argparse.BooleanOptionalAction,
        help="require or avoid the megakernel; default: use it where it runs",
    )

    parser.set_defaults(voices={}, more_words=[])
    return parser
