"""Turn a recording into a speaker.pt for qwen3-tts speak: one bfloat16 vector of the talker's width.

    qwen3-tts clone --ref_audio voice.wav [more.wav ...] --output speaker.pt --model 0.6B

The vector belongs to the model that made it: 0.6B and 1.7B have different widths.
"""

import io
import sys
from pathlib import Path

from qwen3_tts_cuda_graphs.common.command import check_device_name, cli_errors, show_progress
from qwen3_tts_cuda_graphs.common.output_files import check_writable, is_stdout, write_bytes
from qwen3_tts_cuda_graphs.common.parser import Parser
from qwen3_tts_cuda_graphs.common.quick_start import heavy_imports


def main() -> None:
    with cli_errors():  # includes import errors: this Python may lack the packages
        from qwen3_tts_cuda_graphs.common.model_config import base_config
        from qwen3_tts_cuda_graphs.common.model_names import model_name
        from qwen3_tts_cuda_graphs.common.recording_files import read_audio
        from qwen3_tts_cuda_graphs.common.samples import resample

        parser = Parser(prog="qwen3-tts clone", description=__doc__.splitlines()[0])
        parser.add_argument(
            "--ref_audio",
            "--ref-audio",
            required=True,
            type=Path,
            nargs="+",
            action="extend",
            help="recordings of the voice; several are averaged",
        )
        parser.add_argument(
            "--output", "-o", default="speaker.pt", type=Path, help="default: %(default)s; - for stdout"
        )
        parser.add_argument(
            "--model",
            default="0.6B",
            type=model_name,
            help="0.6B, 1.7B, a hub id or a folder of a Base model; default: %(default)s",
        )
        parser.add_argument("--device", help="cuda, cuda:1, cpu; default: cuda where there is one")
        args = parser.parse_args()

        check_device_name(args.device)
        check_writable(args.output, *args.ref_audio)
        recordings = [read_audio(path) for path in args.ref_audio]
        base_config(args.model)

        show_progress(f"loading {args.model}")
        with heavy_imports(args.device):  # only now, so that mistakes are answered at once
            import torch

            from qwen3_tts_cuda_graphs.common.loading import choose_device, load_upstream, model_errors
            from qwen3_tts_cuda_graphs.common.voices import keep_stdout_clean

        with model_errors():
            model = load_upstream(args.model, choose_device(args.device)).model
            keep_stdout_clean(model)
            speakers = []
            wanted = model.speaker_encoder_sample_rate
            for audio, rate in recordings:
                speakers.append(model.extract_speaker_embedding(resample(audio, rate, wanted), wanted))
        speaker = torch.stack(speakers).float().mean(0).bfloat16().cpu()
        if not speaker.isfinite().all():
            raise ValueError("the recordings give NaN or infinite numbers, they may be too loud: give others")

        content = io.BytesIO()
        torch.save(speaker, content)
        write_bytes(args.output, content.getvalue())
        seconds = sum(len(audio) / rate for audio, rate in recordings)
        message = f"{args.output}: {len(speaker)} numbers from {seconds:.1f} s of audio"
        print(message, file=sys.stderr if is_stdout(args.output) else sys.stdout)


if __name__ == "__main__":
    main()
