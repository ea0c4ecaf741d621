"""Sound for the smallest models: SOUND says what the processor of each row makes of it.

Each sequence has two, a long and a short one, where a model takes such.
"""

from __future__ import annotations

from typing import Any

import torch
from tiny_configurations import AUDIO, AUDIO_END, AUDIO_START
from tiny_media import SEQUENCES, Form, Media, N, first, randn
from torch import Tensor

MEL_BINS, FRAMES, SHORT = 16, 32, 20  # of a spectrogram; frames of a short one


def sounds(*tokens: int) -> list[int]:
    return [i for n in tokens for i in (AUDIO_START, *[AUDIO] * n, AUDIO_END)]


def spectrograms(
    *tokens: int, mask: str | None = "input_features_mask", frames: int = FRAMES, short: int = SHORT
) -> Form:
    """A long one and a short one for each sequence, with a mask of frames."""
    inputs: dict[str, Any] = {"input_features": randn(N, MEL_BINS, frames)}
    if mask is not None:
        inputs[mask] = first([frames, short] * SEQUENCES, frames).long()
    return lambda _: Media(sounds(*tokens), inputs)


def frames_first(*tokens: int, mel_bins: int = MEL_BINS) -> Form:
    """Spectrograms whose frames come before their values (Gemma)."""
    inputs = {
        "input_features": randn(N, FRAMES, mel_bins),
        "input_features_mask": first([FRAMES, SHORT] * SEQUENCES, FRAMES),
    }
    return lambda _: Media(sounds(*tokens), inputs)


def embedded(config: Any) -> Media:
    """Samples, cut into what is a token each (Gemma 4 Unified)."""
    inputs = {
        "input_features": randn(N, 6, config.audio_config.audio_embed_dim),
        "input_features_mask": first([6, 4] * SEQUENCES, 6),
    }
    return Media(sounds(6, 4), inputs)


def windows(_: Any) -> Media:
    """Two windows of 15 frames, of three tokens each, with a mask of tokens (Granite Speech)."""
    inputs = {
        "input_features": randn(N, 30, MEL_BINS),
        "input_features_mask": first([6, 4] * SEQUENCES, 6),
    }
    return Media(sounds(6, 4), inputs)


def moss(config: Any) -> Media:
    """Spectrograms beside the mask of the samples that they were made of."""
    media = spectrograms(4, 3)(config)
    return media._replace(
        inputs=media.inputs | {"padding_mask": torch.ones(N, FRAMES, dtype=torch.long)}
    )


def phi4_sound(_: Any) -> Media:
    inputs = {
        "audio_input_features": randn(N, FRAMES, MEL_BINS),
        "audio_embed_sizes": torch.tensor([4, 3] * SEQUENCES),
        "audio_attention_mask": first([FRAMES, SHORT] * SEQUENCES, FRAMES),
    }
    return Media(sounds(4, 3), inputs)


def without_text(_: Any) -> Media:
    """Spectrograms in the place of ids (Pop2Piano)."""
    mask = first([9, 7], 9).long()
    inputs = {"input_features": randn(SEQUENCES, 9, 32), "attention_mask": mask}
    return Media([], inputs, has_text=False)


def waveforms(_: Any) -> Media:
    """Samples, of which four are a token (VibeVoice)."""
    inputs = {
        "input_values": randn(SEQUENCES, 1, 24),
        "padding_mask": torch.ones(SEQUENCES, 24, dtype=torch.bool),
    }
    return Media([AUDIO] * 6, inputs)


class NoiseScheduler:
    """The members of diffusers' schedulers that VibeVoice's loss uses."""

    alpha_t = torch.linspace(0.9, 0.1, 10, dtype=torch.float64)
    sigma_t = (1 - alpha_t**2).sqrt()

    def add_noise(self, x: Tensor, noise: Tensor, timesteps: Tensor) -> Tensor:
        alpha, sigma = (t[timesteps][:, None].to(x) for t in (self.alpha_t, self.sigma_t))
        return alpha * x + sigma * noise


def diffused(config: Any) -> Media:
    """The same with a second loss, of the noise that was added to the sound."""
    media = waveforms(config)
    inputs = media.inputs | {"noise_scheduler": NoiseScheduler()}
    return Media(media.prompt, inputs, {"acoustic_loss_mask": (True, False)})


SOUND: dict[str, Form] = {
    "audioflamingo3": spectrograms(8, 5),
    "gemma3n": frames_first(8, 8),
    "gemma4": frames_first(8, 5, mel_bins=8),
    "gemma4_unified": embedded,
    "glmasr": spectrograms(4, 2),
    "granite_speech": windows,
    "granite_speech_plus": windows,
    "moss_transcribe_diarize": moss,
    "musicflamingo": spectrograms(8, 5),
    "phi4_multimodal": phi4_sound,
    "pop2piano": without_text,
    "qwen2_5_omni_thinker": spectrograms(8, 5, mask="feature_attention_mask"),
    "qwen2_audio": spectrograms(8, 5, mask="feature_attention_mask"),
    "qwen3_asr": spectrograms(13, 8, frames=100, short=60),
    "qwen3_omni_moe_thinker": spectrograms(4, 3, mask="feature_attention_mask"),
    "vibevoice": diffused,
    "vibevoice_asr": waveforms,
    "voxtral": spectrograms(4, 4, mask=None),
}
