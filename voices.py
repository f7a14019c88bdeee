"""A person's words -> upstream's arguments, every mistake answered in one line."""
import torch


def load_speaker(path, width):
    """A speaker.pt as a prompt for generate_voice_clone. Nothing in the file is executed."""
    try:
        speaker = torch.load(path, map_location="cpu", weights_only=True)
    except OSError as error:
        raise ValueError(f"cannot read {path}: {error.strerror}: make a speaker file with extract_speaker.py") from None
    except Exception:
        raise ValueError(f"{path} is not a speaker file: make one with extract_speaker.py") from None
    if not isinstance(speaker, torch.Tensor) or not speaker.is_floating_point() or speaker.dim() != 1:
        raise ValueError(f"{path} does not hold a speaker embedding: make one with extract_speaker.py")
    if len(speaker) != width:
        raise ValueError(f"{path} holds {len(speaker)} numbers, this model takes {width}: extract it again with the "
                         "--model you speak with")
    return dict(ref_code=None, ref_spk_embedding=[speaker], x_vector_only_mode=[True], icl_mode=[False])
