"""One of the served models: what its config supports, its voices, and its engine."""

from collections.abc import Iterable, Sequence
from pathlib import Path

from qwen3_tts_cuda_graphs.common import choices, model_config, model_names
from qwen3_tts_cuda_graphs.common.voice_files import normalized_weights, read_mix
from qwen3_tts_cuda_graphs.prompts.checks import number_ranges
from qwen3_tts_cuda_graphs.prompts.script import takes_instructions
from qwen3_tts_cuda_graphs.serving.cloned_voices import ClonedVoices
from qwen3_tts_cuda_graphs.serving.engine_process import EngineProcess
from qwen3_tts_cuda_graphs.serving.errors import ApiError, mistakes_in
from qwen3_tts_cuda_graphs.serving.requests import SpeechOptions

# Names that OpenAI's clients send to every server; some send `default`.
OPENAI_VOICES = "alloy ash ballad cedar coral echo fable marin nova onyx sage shimmer verse default".split()
DESIGNED_VOICES = {"narrator": "a warm and clear narrator"}  # for a VoiceDesign model without `instructions`
MAX_PARTS = 10  # of a path that is used as the name of a model
MAX_MIXED = 8  # voices per mix
NUMBERS = ("temperature", "top_k", "top_p", "repetition_penalty", "max_new_tokens")


def normalized(name: str | None) -> str:
    """The name under which a voice is looked up. No name means the same as a name of OpenAI's: any voice."""
    return (name or OPENAI_VOICES[0]).strip().lower()


def named_models(models: Iterable[str]) -> dict[str, str]:
    """A dict from the name that clients use to the folder, hub id or short name.

    A model may be given as name=folder. Folders of the same name get as much of their path as is needed to tell them
    apart: upstream's finetuning gives all of them the same name.
    """
    models = [model_names.split_name(model) for model in models]
    if not models:
        raise ValueError("there is no model: give one")
    names = [name or model_names.display_name(model) for name, model in models]
    for depth in range(2, MAX_PARTS):
        doubled = {name for name in names if names.count(name) > 1}
        for number, (name, model) in enumerate(models):
            if names[number] in doubled and not name and Path(model).is_dir():
                names[number] = "-".join(Path(model).absolute().parts[1:][-depth:])
    if len(set(names)) < len(names):
        name = max(names, key=names.count)
        raise ValueError(f"two models would have the name {name}: give each once, or as --model another-name=folder")
    return {name: model for name, (_, model) in zip(names, models)}


class Model:
    def __init__(
        self, id: str, source: str, engine: EngineProcess, file_voices: Iterable[str], cloned_voices: ClonedVoices
    ):
        """id: what clients call it; source: folder, hub id or short name; file_voices: names from --speaker files"""
        self.id = id
        self.source = source
        self.engine = engine
        self.config = model_config.read_config(source)
        self.kind = self.config["tts_model_type"]
        self.clones = self.kind == "base"
        self.takes_instructions = takes_instructions(self.kind, self.config.get("tts_model_size"))
        self.ranges = number_ranges(self.config)
        positions = self.config["talker_config"]["max_position_embeddings"]
        self.ranges["max_new_tokens"] = (lambda x: 2 <= x <= positions, f"from 2 to {positions}")
        self.presets = []
        if self.kind == "custom_voice":
            self.presets = sorted(map(str.lower, self.config["talker_config"]["spk_id"]))
        if self.kind == "voice_design":
            self.presets = list(DESIGNED_VOICES)
        self.file_voices = list(file_voices)
        self.own_voices = [*self.presets, *self.file_voices]
        self.cloned_voices = cloned_voices

    def is_named(self, name: str) -> bool:
        hub_name = model_names.hub_name(self.source)
        known = {self.id, self.source, hub_name, hub_name.split("/")[-1]}
        return name.strip().lower() in {name.lower() for name in known}

    # ---- Voices

    @property
    def voice_names(self) -> list[str]:
        """Its own voices, then the registered ones, oldest first."""
        return [*self.own_voices, *(self.cloned_voices.registered if self.clones else ())]

    def can_do(self, options: SpeechOptions) -> bool:
        """Whether it supports the voice and the style of a request that names no model."""
        if options.has_reference:
            return self.clones
        if options.instructions and not self.takes_instructions:
            return False
        return self.knows_voice(options.voice)

    def knows_voice(self, name: str | None) -> bool:
        """Whether `find_voice` has a voice for this name, or for each name of a mix."""
        mixed = [one for one, _ in read_mix(name or "")] if self.clones else []
        return all(self.find_voice(one) for one in mixed or [name])

    def has_voice(self, name: str | None) -> bool:
        """Whether it has a voice of this name; OpenAI's names do not count."""
        return normalized(name) in self.voice_names

    def find_voice(self, name: str | None) -> str | None:
        """The voice for a name. For OpenAI's names, and without one, some voice of the model, always the same."""
        wanted, names = normalized(name), self.voice_names
        if wanted in names:
            return wanted
        if wanted not in OPENAI_VOICES or not names:
            return None
        if self.presets:
            return self.presets[OPENAI_VOICES.index(wanted) % len(self.presets)]
        return names[0]  # the oldest stays the same when voices are added

    def resolve_voice(self, name: str | None) -> str:
        if (voice := self.find_voice(name)) is None:
            raise unknown_voice(name, self.voice_names)
        return voice

    def resolve_mix(self, name: str | None) -> list[tuple[str, float]]:
        """The voices of a mix and their shares. Empty for a single voice."""
        mix = [] if self.has_voice(name) else read_mix(name or "")
        if not mix:
            return []
        if not self.clones:
            problem = f"the voice {name[:80]!r} is a mix of embeddings, not for {model_config.KINDS[self.kind]}"
            raise ApiError(f"{problem}: choose one of its voices", param="voice")
        with mistakes_in("voice"):
            if len(mix) > MAX_MIXED:
                raise ValueError(f"the voice {name[:80]!r} is a mix of {len(mix)}: give at most {MAX_MIXED}")
            names, weights = zip(*mix)
            shares = normalized_weights(weights, len(names))
        return [(self.resolve_voice(one), share) for one, share in zip(names, shares)]

    # ---- Checks

    def check(self, options: SpeechOptions) -> None:
        """Refuse what this model does not support, before any work starts."""
        for name in (*NUMBERS, "seed"):
            value = getattr(options, name)
            is_possible, wanted = self.ranges[name]
            if value is not None and not is_possible(value):
                raise ApiError(f"{name} is {value}, it must be {wanted}", param=name, code="invalid_value")
        languages = model_config.languages(self.config)
        if options.language and options.language.lower() not in languages:
            nearest = choices.nearest(options.language, languages)
            raise ApiError(f"there is no language {options.language!r}: choose {nearest}", param="language")
        self.check_reference(options)

    def check_reference(self, options: SpeechOptions) -> None:
        """Refuse fields that do not describe exactly one voice."""
        if options.ref_audio is not None and options.speaker_embedding is not None:
            raise ApiError("ref_audio and speaker_embedding are two voices: give one of them", param="ref_audio")
        if options.ref_audio is None:
            check_no_reference(options)
        if not options.has_reference:
            if not self.resolve_mix(options.voice):
                self.resolve_voice(options.voice)
            return
        self.check_cloning("ref_audio" if options.ref_audio is not None else "speaker_embedding")
        has_text = bool(options.ref_text and options.ref_text.strip())
        if options.x_vector_only_mode is False and options.ref_audio is not None and not has_text:
            raise ApiError("ref_text is missing: give what the recording says", param="ref_text")
        width = self.config["talker_config"]["hidden_size"]
        if options.speaker_embedding is not None and len(options.speaker_embedding) != width:
            raise ApiError(
                f"speaker_embedding has {len(options.speaker_embedding)} numbers, this model takes {width}: extract it "
                "with the model you speak with",
                param="speaker_embedding",
            )

    def check_cloning(self, what: str) -> None:
        if not self.clones:
            raise ApiError(f"{what} is not for {model_config.KINDS[self.kind]}: choose one of its voices", param=what)

    # ---- Arguments of upstream's method

    def preset_voice(self, options: SpeechOptions) -> dict:
        name = self.resolve_voice(options.voice)
        if self.kind == "custom_voice":
            return {"speaker": name, "instruct": options.instructions if self.takes_instructions else None}
        return {"instruct": options.instructions or DESIGNED_VOICES[name]}

    def describe(self) -> dict:
        """Its entry in /v1/models: OpenAI's fields, and those that the page uses."""
        return {
            "id": self.id,
            "object": "model",
            "created": 0,
            "owned_by": "qwen",
            "kind": self.kind,
            "languages": model_config.languages(self.config),
            "random_weights": bool(self.config.get("random_weights")),
            "voices": self.voice_names,
        }


def unknown_voice(name: str | None, names: Sequence[str]) -> ApiError:
    if names:
        problem = f"there is no voice {name!r}: choose {choices.nearest(normalized(name), names)}"
        if ":" in (name or ""):
            problem += "; a mix is written as aiden:0.7,vivian:0.3"
    else:
        problem = (
            "this model clones voices and none is registered: POST a recording to /v1/audio/voices, or send "
            "ref_audio with the request"
        )
    return ApiError(problem, param="voice", code="unknown_voice")


def sampling(options: SpeechOptions) -> dict:
    """The sampling settings as arguments of upstream's methods. None stands for the model's default."""
    arguments = {name: getattr(options, name) for name in NUMBERS}
    arguments["language"] = options.language or "Auto"
    if options.non_streaming_mode is not None:
        arguments["non_streaming_mode"] = options.non_streaming_mode
    return arguments


def check_no_reference(options: SpeechOptions) -> None:
    """Refuse fields about ref_audio: without it, a registered voice is used, which has its own transcript."""
    if options.ref_text:
        name, meaning = "ref_text", "what ref_audio says"
    elif options.x_vector_only_mode and options.speaker_embedding is None:
        name, meaning = "x_vector_only_mode", "how ref_audio is used"
    else:
        return
    raise ApiError(f"{name} is {meaning}, which is missing: send ref_audio, or leave {name} out", param=name)
