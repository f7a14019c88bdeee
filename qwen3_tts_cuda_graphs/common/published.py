"""The published models: their names, and what is known about them without a download."""

import os

VARIANTS = ("0.6B-Base", "1.7B-Base", "0.6B-CustomVoice", "1.7B-CustomVoice", "1.7B-VoiceDesign")
# Short name -> hub id. generate.py has a copy, because it runs without the package.
MODELS = {name.removesuffix("-Base"): f"Qwen/Qwen3-TTS-12Hz-{name}" for name in VARIANTS}
KIND_OF = {"Base": "base", "CustomVoice": "custom_voice", "VoiceDesign": "voice_design"}
MODELS_OF_KIND = {
    kind: [name for name, hub_id in MODELS.items() if hub_id.endswith(variant)] for variant, kind in KIND_OF.items()
}
CLONING_MODEL, PRESET_MODEL = "0.6B", "0.6B-CustomVoice"  # the default models with and without a voice to clone
FRAME_RATE = 12.5  # frames per second of the "12 Hz" models
HIDDEN_SIZES = {"0.6B": 1024, "1.7B": 2048}
TALKER = dict(vocab_size=3072, max_position_embeddings=32768)
LANGUAGE_IDS = dict(
    chinese=2055,
    english=2050,
    german=2053,
    italian=2070,
    portuguese=2071,
    spanish=2054,
    japanese=2058,
    korean=2064,
    french=2061,
    russian=2069,
)
DIALECT_IDS = dict(beijing_dialect=2074, sichuan_dialect=2062)
SPEAKERS = dict(  # name -> token id, in the CustomVoice models
    aiden=2861, dylan=2878, eric=2875, ono_anna=2873, ryan=3061, serena=3066, sohee=2864, uncle_fu=3010, vivian=3065
)
SPEAKER_DIALECTS = dict(dylan="beijing_dialect", eric="sichuan_dialect")


def speakers_and_languages(kind: str) -> dict:
    """The languages and speakers in a talker's config."""
    speakers = SPEAKERS if kind == "custom_voice" else {}
    return dict(
        codec_language_id=LANGUAGE_IDS | (DIALECT_IDS if speakers else {}),
        spk_id=speakers,
        spk_is_dialect={name: SPEAKER_DIALECTS.get(name, False) for name in speakers},
    )


def published_config(model: str) -> dict | None:
    """The part of a published model's config.json that the checks of options need. None for any other model."""
    hub_id = MODELS.get(model, model)
    if os.path.exists(model) or hub_id not in MODELS.values():
        return None
    size, kind = hub_id.split("-")[-2:]
    return dict(
        tts_model_type=KIND_OF[kind],
        tts_model_size={"0.6B": "0b6", "1.7B": "1b7"}[size],
        talker_config=TALKER | dict(hidden_size=HIDDEN_SIZES[size]) | speakers_and_languages(KIND_OF[kind]),
    )
