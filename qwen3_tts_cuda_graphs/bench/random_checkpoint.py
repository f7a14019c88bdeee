"""Write a Qwen3-TTS checkpoint folder with random weights, in the layout of the published ones.

    python -m qwen3_tts_cuda_graphs.bench.random_checkpoint tiny OUT  # small enough for a CPU: tests, a first look
    python -m qwen3_tts_cuda_graphs.bench.random_checkpoint 0.6B OUT  # the published shapes: timing without a download
    python -m qwen3_tts_cuda_graphs.bench.random_checkpoint 1.7B --type custom_voice OUT

Upstream's from_pretrained loads all of it: model, codec and processor. The audio is noise. The text tokenizer is made
here: a token is a byte, or a special token or word of upstream's prompt format.
"""

import argparse
import json
import string
from itertools import chain, islice, product
from pathlib import Path

import torch
from safetensors.torch import save_model
from tokenizers.pre_tokenizers import ByteLevel
from transformers import EncodecFeatureExtractor, Qwen2TokenizerFast

from qwen3_tts_cuda_graphs.common import published
from qwen3_tts_cuda_graphs.common.command import cli_errors
from qwen3_tts_cuda_graphs.common.loading import model_errors
from qwen3_tts_cuda_graphs.common.parser import Parser
from qwen3_tts_cuda_graphs.upstream import (
    Qwen3TTSConfig,
    Qwen3TTSForConditionalGeneration,
    Qwen3TTSProcessor,
    Qwen3TTSTokenizerV2Config,
    Qwen3TTSTokenizerV2Model,
)

CODEC_IDS = dict(
    codec_bos_id=2149,
    codec_eos_token_id=2150,
    codec_think_id=2154,
    codec_nothink_id=2155,
    codec_pad_id=2148,
    codec_think_bos_id=2156,
    codec_think_eos_id=2157,
)

SPECIAL_TOKENS = ["<|im_start|>", "<|im_end|>", "<tts_pad>", "<tts_text_bos>", "<tts_text_eod>"]

# Only what differs from the defaults of the config classes, which are those of the published checkpoints.
ROPE_SCALING = dict(interleaved=True, rope_type="default", type="default")
TALKER = published.TALKER | dict(
    num_hidden_layers=28,
    num_key_value_heads=8,
    head_dim=128,
    text_vocab_size=151936,
    num_code_groups=16,
    rope_theta=1000000,
    position_id_per_seconds=13,
    rope_scaling=ROPE_SCALING | dict(mrope_section=[24, 20, 20]),
)
PREDICTOR = dict(num_code_groups=16, max_position_embeddings=65536, rope_theta=1000000)
CODEC_DECODER = dict(
    codebook_dim=512,
    hidden_size=512,
    intermediate_size=1024,
    head_dim=64,
    num_semantic_quantizers=1,
    semantic_codebook_size=4096,
    vector_quantization_hidden_dimension=512,
)

TINY_HEADS = dict(num_attention_heads=4, num_key_value_heads=2, head_dim=16)
TALKER_SIZES = {
    "0.6B": dict(hidden_size=published.HIDDEN_SIZES["0.6B"], intermediate_size=3072),
    "1.7B": dict(hidden_size=published.HIDDEN_SIZES["1.7B"], intermediate_size=6144),
    "tiny": dict(
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_code_groups=3,  # on a CPU upstream spends most of its time in the predictor's steps
        text_vocab_size=512,
        text_hidden_size=48,
        rope_scaling=ROPE_SCALING | dict(mrope_section=[4, 2, 2]),
        **TINY_HEADS,
    ),
}
TINY_PREDICTOR = dict(hidden_size=48, intermediate_size=96, num_hidden_layers=1, **TINY_HEADS)
TINY_SPEAKER_ENCODER = dict(
    enc_channels=[16, 16, 16, 16, 48], enc_attention_channels=8, enc_se_channels=8, enc_res2net_scale=4
)
TINY_LAYERS = dict(
    hidden_size=32, intermediate_size=64, head_dim=16, num_attention_heads=2, num_key_value_heads=2, num_hidden_layers=2
)
# Half as many blocks as the published codec, for the same number of samples per frame, because small convolutions take
# the longest.
TINY_DECODER = dict(latent_dim=64, codebook_dim=32, decoder_dim=16, upsample_rates=(24, 20), upsampling_ratios=(2, 2))
TINY_DECODER |= TINY_LAYERS
TINY_ENCODER = dict(num_filters=4, num_quantizers=8, codebook_dim=16, vector_quantization_hidden_dimension=16)
TINY_ENCODER |= dict(upsample_groups=32, **TINY_LAYERS)

SAMPLING = dict(temperature=0.9, top_k=50, top_p=1.0)
GENERATION = dict(do_sample=True, subtalker_dosample=True, repetition_penalty=1.05, max_new_tokens=8192)
GENERATION |= SAMPLING | {f"subtalker_{name}": value for name, value in SAMPLING.items()}


def main() -> None:
    parser = Parser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("size", choices=[*TALKER_SIZES])
    parser.add_argument("out", type=Path, metavar="OUT", help="the folder to write")
    parser.add_argument("--type", default="base", choices=["base", "custom_voice", "voice_design"])
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--gain", type=float, default=1.0, help="scale of the weights: more makes sharper choices")
    args = parser.parse_args()
    weights = write_checkpoint(args.out, args.size, args.type, args.seed, args.gain)
    print(f"{args.out}: {args.size} {args.type} with {weights / 1e6:.1f}M random weights; all it can speak is noise")


@torch.no_grad()
def write_checkpoint(
    out: Path,
    size: str,
    kind: str = "base",
    seed: int = 0,
    gain: float = 1.0,
    ends: bool | None = None,
    merges: int = 0,
    codec_gain: float = 0.7,
    talker: dict | None = None,
    predictor: dict | None = None,
) -> int:
    """Write a checkpoint folder, with a speaker.pt for a Base model. Returns the number of weights of the main model.

    ends: whether the model ends its speech by itself, after some seconds, or only at max_new_tokens. Default: tiny
    models end; those of the published sizes are for timing and do not.
    merges: the number of further entries of the vocabulary, made of two or three bytes. Above 100,000 entries
    transformers treats a tokenizer differently.
    codec_gain: scale of the codec's weights; with the default the codec is well-conditioned
    talker, predictor: sizes that replace those of their configs
    """
    if ends is None:
        ends = size == "tiny"
    codec_folder = out / "speech_tokenizer"
    out.mkdir(parents=True, exist_ok=True)
    torch.manual_seed(seed)
    tokenizer = byte_tokenizer(out, merges)
    config = main_config(size, kind, tokenizer, talker, predictor)
    codec_settings = codec_config(size, config["talker_config"]["num_code_groups"])

    with torch.device("cuda" if torch.cuda.is_available() else "cpu"):
        model = randomize(Qwen3TTSForConditionalGeneration(Qwen3TTSConfig(**config)), gain)
        codec = randomize(Qwen3TTSTokenizerV2Model(Qwen3TTSTokenizerV2Config(**codec_settings)), codec_gain)
        soften(codec.decoder)
        model.talker.codec_head.weight[CODEC_IDS["codec_eos_token_id"]] *= 5 if ends else 0
        speaker = torch.randn(config["talker_config"]["hidden_size"])
        randomize(codec.encoder)  # so that the codes of a recording differ from frame to frame

    codec_folder.mkdir(exist_ok=True)
    save_model(model.to(torch.bfloat16), out / "model.safetensors", metadata={"format": "pt"})
    save_model(codec, codec_folder / "model.safetensors", metadata={"format": "pt"})
    Qwen3TTSProcessor(tokenizer).save_pretrained(out)
    EncodecFeatureExtractor(feature_size=1, sampling_rate=24000).save_pretrained(codec_folder)
    write_json(out / "config.json", config)
    write_json(out / "generation_config.json", GENERATION)
    write_json(codec_folder / "config.json", codec_settings)
    if kind == "base":
        torch.save(speaker.bfloat16().cpu(), out / "speaker.pt")
    return sum(weight.numel() for weight in model.parameters())


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2))


def byte_tokenizer(folder: Path, further_merges: int) -> Qwen2TokenizerFast:
    """A byte-level tokenizer in which `<|im_start|>assistant` and a newline are three tokens, as upstream expects."""
    vocab = dict.fromkeys(sorted(ByteLevel.alphabet()))
    merges = []
    for word in ("assistant", "user"):
        for end in range(2, len(word) + 1):
            merges.append(f"{word[: end - 1]} {word[end - 1]}")
            vocab[word[:end]] = None
    syllables = map("".join, product(string.ascii_lowercase, repeat=2))
    pairs = chain(
        product(sorted(ByteLevel.alphabet(), reverse=True), repeat=2), product(syllables, sorted(ByteLevel.alphabet()))
    )
    for first, second in islice(pairs, further_merges):
        if first + second not in vocab:
            merges.append(f"{first} {second}")
            vocab[first + second] = None
    (folder / "vocab.json").write_text(json.dumps({token: i for i, token in enumerate(vocab)}))
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    tokenizer = Qwen2TokenizerFast.from_pretrained(folder)
    tokenizer.add_special_tokens({"additional_special_tokens": SPECIAL_TOKENS})
    return tokenizer


def talker_config(size: str, kind: str, sizes: dict | None = None, predictor_sizes: dict | None = None) -> dict:
    """The talker's config, which includes the code predictor's."""
    talker = TALKER | TALKER_SIZES[size] | CODEC_IDS | published.speakers_and_languages(kind) | (sizes or {})
    predictor = PREDICTOR | (TINY_PREDICTOR if size == "tiny" else {}) | (predictor_sizes or {})
    return talker | dict(code_predictor_config=predictor | dict(num_code_groups=talker["num_code_groups"]))


def main_config(size: str, kind: str, tokenizer: Qwen2TokenizerFast, *sizes: dict | None) -> dict:
    """The config.json of talker, code predictor and, for a Base model, speaker encoder."""
    talker = talker_config(size, kind, *sizes)
    talker["text_vocab_size"] = max(talker["text_vocab_size"], len(tokenizer))
    token_id = tokenizer.convert_tokens_to_ids
    config = dict(
        architectures=["Qwen3TTSForConditionalGeneration"],
        random_weights=True,  # the server's page shows it
        model_type="qwen3_tts",
        tts_model_type=kind,
        tokenizer_type="qwen3_tts_tokenizer_12hz",
        tts_model_size={"0.6B": "0b6"}.get(size, "1b7"),
        im_start_token_id=token_id("<|im_start|>"),
        im_end_token_id=token_id("<|im_end|>"),
        assistant_token_id=token_id("assistant"),
        tts_pad_token_id=token_id("<tts_pad>"),
        tts_bos_token_id=token_id("<tts_text_bos>"),
        tts_eos_token_id=token_id("<tts_text_eod>"),
        talker_config=talker,
    )
    if kind == "base":
        encoder = dict(enc_dim=talker["hidden_size"], sample_rate=24000)
        config["speaker_encoder_config"] = encoder | (TINY_SPEAKER_ENCODER if size == "tiny" else {})
    return config


def codec_config(size: str, codes: int | None = None) -> dict:
    """The config.json of the 12 Hz codec, in the folder speech_tokenizer. codes: per frame; default: the size's"""
    is_tiny = size == "tiny"
    codes = codes or (TALKER | TALKER_SIZES[size])["num_code_groups"]
    return dict(
        architectures=["Qwen3TTSTokenizerV2Model"],
        model_type="qwen3_tts_tokenizer_12hz",
        decoder_config=CODEC_DECODER | (TINY_DECODER if is_tiny else {}) | dict(num_quantizers=codes),
        encoder_config=TINY_ENCODER if is_tiny else {},
        encoder_valid_num_quantizers=codes,
    )


def randomize(model: torch.nn.Module, gain: float = 1.0) -> torch.nn.Module:
    """Normally distributed weights: matrices keep the variance of their input, times `gain` squared; embeddings have a
    standard deviation of `gain`; vectors stay as initialized."""
    for name, weight in [*model.named_parameters(), *model.named_buffers()]:
        if "embed" in name and weight.dim() == 2:
            weight.normal_(std=gain)
        elif weight.dim() > 1:
            weight.normal_(std=gain * weight[0].numel() ** -0.5)
    return model


def soften(decoder: torch.nn.Module) -> None:
    """Scale the last convolution so that the noise is at about -20 dBFS and never clips."""
    last = decoder.decoder[-1]
    levels = []
    hook = last.register_forward_hook(lambda module, inputs, output: levels.append(output.std()))
    decoder(torch.randint(decoder.config.codebook_size, (1, decoder.config.num_quantizers, 25)))
    hook.remove()
    last.conv.weight.mul_(0.1 / levels[0])


if __name__ == "__main__":
    with cli_errors(), model_errors():
        main()
