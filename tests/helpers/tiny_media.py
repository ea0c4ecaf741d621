"""Images and sound for the smallest models: IMAGES and SOUND say what the processor of each row
makes of them, and ``with_media`` puts them before the text of a batch.

Each sequence has two, of different sizes or lengths where a model takes such.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
import transformers
from tiny_configurations import (
    AUDIO,
    AUDIO_END,
    AUDIO_START,
    IMAGE,
    IMAGE_SIZE,
    MERGE_SIZE,
    NUM_TILES,
    PATCH_SIZE,
    VIDEO,
    VISION_END,
    VISION_START,
    each,
)
from torch import Tensor
from transformers import PreTrainedModel

SEQUENCES = 2  # of a batch
N = 2 * SEQUENCES  # images or sounds of a batch, where a sequence has two
SIDE = IMAGE_SIZE // PATCH_SIZE  # patches
GRIDS = [(SIDE, SIDE), (MERGE_SIZE, SIDE)]  # of the images of a sequence: rows and columns
PATCHES = SEQUENCES * sum(rows * columns for rows, columns in GRIDS)
PATCH_VALUES = 3 * PATCH_SIZE**2
MERGED = [rows * columns // MERGE_SIZE**2 for rows, columns in GRIDS]  # tokens of each image
MEL_BINS, FRAMES, SHORT = 16, 32, 20  # of a spectrogram; frames of a short one


class Media(NamedTuple):
    """What a processor makes of images or sound."""

    prompt: list[int]  # the ids of one sequence, before its text
    inputs: dict[str, Any]  # the other arguments of the model
    # arguments with a value for each token: at those of the prompt, and at those of the text
    of_tokens: dict[str, tuple[Any, Any]] | None = None
    has_text: bool = True  # False: the model takes this instead of ids


Form = Callable[[Any], Media]  # of the model's configuration


def with_media(model: PreTrainedModel, batch: dict[str, Tensor], form: Form) -> dict[str, Any]:
    """`batch` with images or sound before the text of each sequence, ignored by the labels."""
    media = form(model.config)
    inputs = {name: _cast(value, model.dtype) for name, value in media.inputs.items()}
    if not media.has_text:
        return {"labels": batch["labels"], **inputs}
    ids = torch.tensor([media.prompt] * SEQUENCES)
    types = sum(number * (ids == token) for number, token in enumerate((IMAGE, VIDEO, AUDIO), 1))
    before = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "labels": torch.full_like(ids, -100),
        "token_type_ids": (ids == IMAGE).long(),
        "mm_token_type_ids": types,
    }
    joined = {name: torch.cat([before[name], value], 1) for name, value in batch.items()}
    length = batch["input_ids"].shape[1]
    for name, (of_prompt, of_text) in (media.of_tokens or {}).items():
        of_each = [of_prompt] * len(media.prompt) + [of_text] * length
        row = torch.stack([torch.as_tensor(each) for each in of_each])
        inputs[name] = torch.stack([row] * SEQUENCES)
    return joined | inputs


def _cast(value: Any, dtype: torch.dtype) -> Any:
    is_floating = isinstance(value, Tensor) and value.is_floating_point()
    return value.to(dtype) if is_floating else value


def randn(*shape: int, seed: int = 0) -> Tensor:
    """The same numbers for one shape and seed."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pixels(*shape: int, seed: int = 0) -> Tensor:
    """Images of shape (*shape, 3, IMAGE_SIZE, IMAGE_SIZE)."""
    return randn(*shape, 3, IMAGE_SIZE, IMAGE_SIZE, seed=seed)


def first(lengths: list[int], longest: int) -> Tensor:
    """(number of lengths, longest) True in the first so many of each row."""
    return torch.arange(longest) < torch.tensor(lengths)[:, None]


def images(*tokens: int) -> list[int]:
    """The ids of images of so many tokens."""
    return [i for n in tokens for i in (VISION_START, *[IMAGE] * n, VISION_END)]


def sounds(*tokens: int) -> list[int]:
    return [i for n in tokens for i in (AUDIO_START, *[AUDIO] * n, AUDIO_END)]


def fixed(prompt: list[int], **inputs: Any) -> Form:
    """The same for every configuration."""
    return lambda _: Media(prompt, inputs)


def pictures(tokens: int, *others: str) -> Form:
    """Images of one size, the same under other names too."""
    return fixed(images(tokens, tokens), **{n: pixels(N) for n in ("pixel_values", *others)})


def half_masked(*shape: int) -> Tensor:
    """(*shape, IMAGE_SIZE, IMAGE_SIZE) False in the lower half of each sequence's second image."""
    mask = torch.ones(SEQUENCES, 2, IMAGE_SIZE, IMAGE_SIZE, dtype=torch.bool)
    mask[:, 1, IMAGE_SIZE // 2 :] = False
    return mask.view(*shape, IMAGE_SIZE, IMAGE_SIZE)


def sized(*tokens: int) -> Form:
    """Images in one tensor, with their sizes in pixels."""
    sizes = torch.tensor(GRIDS * SEQUENCES) * PATCH_SIZE
    return fixed(images(*tokens), pixel_values=pixels(N), image_sizes=sizes)


def grids(config: Any) -> Media:
    """Patches of all images one after the other, with the sizes of their grids."""
    vision = config.vision_config
    frames = getattr(vision, "temporal_patch_size", getattr(vision, "patch_temporal", 1))
    thw = torch.tensor([(1, *grid) for grid in GRIDS] * SEQUENCES)
    inputs = {"pixel_values": randn(PATCHES, frames * PATCH_VALUES), "image_grid_thw": thw}
    return Media(images(*MERGED), inputs)


def square_patches(config: Any) -> Media:
    """The same with patches of three dimensions."""
    media = grids(config)
    patches = media.inputs["pixel_values"].view(PATCHES, 3, PATCH_SIZE, PATCH_SIZE)
    return media._replace(inputs=media.inputs | {"pixel_values": patches})


def merged_grids(config: Any) -> Media:
    """The same with the number of patches to merge, for each image (VideoLLaMA 3)."""
    sizes = {"image_merge_sizes": torch.tensor([MERGE_SIZE, 1] * SEQUENCES)}
    return Media(images(MERGED[0], math.prod(GRIDS[1])), grids(config).inputs | sizes)


def positions(merge: int, side: int = SIDE) -> Form:
    """Patches of each image with their positions, -1 in padding (Gemma 4)."""
    values = PATCH_VALUES * (SIDE // side) ** 2
    grid = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    padded = grid.clone()
    padded[side**2 // 2 :] = -1
    tokens = side**2 // merge**2
    return fixed(
        images(tokens, tokens // 2),
        pixel_values=randn(N, side**2, values),
        image_position_ids=torch.stack([grid, padded] * SEQUENCES),
    )


def one_row(merge: int) -> Form:
    """Patches of all images beside each other in one row (MiniCPM-V)."""
    sizes = [(SIDE, SIDE), (SIDE, 2 * SIDE)]
    patches = [rows * columns for rows, columns in sizes]
    return fixed(
        images(*(number // merge**2 for number in patches)),
        pixel_values=randn(1, 3, PATCH_SIZE, SEQUENCES * sum(patches) * PATCH_SIZE),
        target_sizes=torch.tensor(sizes * SEQUENCES, dtype=torch.int32),
    )


# An image (8, 32) in two tiles of 16 x 16 and one of the whole: the tokens of the whole, and those
# of the rows that the image fills in the tiles, each with a newline.
TILED = SIDE**2 + SIDE // 2 * (2 * SIDE + 1)


def tiles(**others: Any) -> Form:
    """One image for each sequence, in tiles (LLaVA-NeXT)."""
    sizes = torch.tensor([[IMAGE_SIZE // 2, 2 * IMAGE_SIZE]] * SEQUENCES)
    return fixed(images(TILED), pixel_values=pixels(SEQUENCES, 3), image_sizes=sizes, **others)


def with_video(form: Form, tokens: int) -> Form:
    """The form with a video of two frames for each sequence, of so many tokens."""
    video = {"pixel_values_videos": pixels(SEQUENCES, 2, seed=1)}

    def both(config: Any) -> Media:
        media = form(config)
        return Media([*media.prompt, *[VIDEO] * tokens], media.inputs | video)

    return both


def crops(prompt: list[int], **others: Any) -> Form:
    """Images with crops of the first image of each sequence."""
    local = {"pixel_values_local": pixels(2 * SEQUENCES, seed=1)}
    numbers = {"num_local_patches": [2, 0] * SEQUENCES}
    return fixed(prompt, pixel_values=pixels(N), **local, **numbers, **others)


def cross_attended(_: Any) -> Media:
    """Images in one tile and in two, which the text attends to (Llama 3.2)."""
    tiles = first([1, 2] * SEQUENCES, NUM_TILES).long().view(SEQUENCES, 2, NUM_TILES)
    inputs = {
        "pixel_values": pixels(SEQUENCES, 2, NUM_TILES),
        "aspect_ratio_ids": torch.tensor([[1, 2]] * SEQUENCES),
        "aspect_ratio_mask": tiles,
    }
    mask = {"cross_attention_mask": (tiles[0], tiles[0])}
    return Media([IMAGE] * 2, inputs, mask)


def patches_with_places(_: Any) -> Media:
    """Patches with their rows and columns in front, counted from 1 (KOSMOS-2.5)."""
    grid = torch.cartesian_prod(torch.arange(1, SIDE + 1), torch.arange(1, SIDE + 1))
    places = grid.expand(SEQUENCES, -1, -1)
    patches = torch.cat([places, randn(SEQUENCES, SIDE**2, PATCH_VALUES)], -1)
    mask = {"image_embeds_position_mask": (1, 0)}
    return Media([IMAGE] * 4, {"flattened_patches": patches}, mask)


FUYU = "image_patches" if transformers.__version__.startswith("5.0.") else "pixel_values"
POOLED = SIDE // 2  # patches of Phi-4, which joins them before they are tokens
IMAGES: dict[str, Form] = {
    **each("lighton_ocr mistral3 mistral_large4", sized(*MERGED)),
    **each(
        "idefics2 idefics3 smolvlm",
        fixed(
            images(4, 4),
            pixel_values=pixels(SEQUENCES, 2),
            pixel_attention_mask=half_masked(SEQUENCES, 2),
        ),
    ),
    **each("aya_vision cohere2_vision internvl llama4 qianfan_ocr", pictures(4)),
    **each("deepseek_vl gemma3 gemma3n janus llava paligemma t5gemma2 vipllava", pictures(16)),
    **each(
        "cohere_compass cosmos3_edge cosmos3_omni ernie4_5_vl_moe exaone4_5 glm46v glm4v"
        " glm4v_moe glm_ocr hyperclovax_vision_v2 lfm3_vl minimax_m3_vl muse_glimmer"
        " qwen2_5_omni_thinker qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_omni_moe_thinker"
        " qwen3_vl qwen3_vl_moe qwen4_exp",
        grids,
    ),
    "aria": fixed(images(4, 4), pixel_values=pixels(N), pixel_mask=half_masked(N)),
    "deepseek_vl_hybrid": pictures(16, "high_res_pixel_values"),
    "emu3": sized(4 * 5, 2 * 5),
    # patches that no tower encodes
    "fuyu": fixed([IMAGE] * SIDE**2, **{FUYU: randn(SEQUENCES, SIDE**2, PATCH_VALUES)}),
    "gemma4": positions(2),
    "gemma4_unified": positions(1, SIDE // MERGE_SIZE),
    "got_ocr2": pictures(1),
    # two tiles for each sequence, and one of padding
    "granite_docling": fixed(
        images(4, 4),
        pixel_values=pixels(SEQUENCES, 3),
        pixel_attention_mask=first([2] * SEQUENCES, 3),
    ),
    **each("kimi_k25 paddleocr_vl", square_patches),
    "kosmos-2.5": patches_with_places,
    # patches of each image, padded, with the shapes of the images
    "lfm2_vl": fixed(
        images(*MERGED),
        pixel_values=randn(N, SIDE**2, PATCH_VALUES),
        spatial_shapes=torch.tensor(GRIDS * SEQUENCES),
        pixel_attention_mask=first([math.prod(g) for g in GRIDS] * SEQUENCES, SIDE**2).long(),
    ),
    "llava_next": tiles(),
    "llava_next_video": with_video(tiles(), 2 * 4),
    "llava_onevision": with_video(
        tiles(batch_num_images=torch.ones(2, dtype=torch.long)), 2 * 4 + 1
    ),
    "minicpm_ocr": one_row(2),
    **each("minicpmv4_6 minicpmv4_7", one_row(4)),
    "mllama": cross_attended,
    # one image for each sequence, between tokens that the tower embeds too
    "ovis2": fixed(images(SIDE**2), pixel_values=pixels(SEQUENCES)),
    # a whole image and two crops beside each other, pooled; newlines and a separator
    "phi4_multimodal": fixed(
        images(POOLED * (2 * POOLED + 1) + 1 + POOLED * (POOLED + 1)),
        image_pixel_values=pixels(SEQUENCES, 3),
        image_sizes=torch.tensor([[IMAGE_SIZE, 2 * IMAGE_SIZE]] * SEQUENCES),
        image_attention_mask=torch.ones(SEQUENCES, 3, SIDE, SIDE, dtype=torch.bool),
    ),
    "step3p7": crops(images(3, 1)),
    # in rows: a newline ends each row, a separator each image
    "unlimited_ocr": crops(images(3 + 2 + 1, 2 + 1), patches_grid=[[2, 1], [0, 0]] * SEQUENCES),
    "video_llama_3": merged_grids,
    "video_llava": with_video(pictures(16), 2 * 17),
}


def spectrograms(
    *tokens: int,
    mask: str | None = "input_features_mask",
    frames: int = FRAMES,
    short: int = SHORT,
    **others: Any,
) -> Form:
    """A long one and a short one for each sequence, with a mask of frames."""
    inputs: dict[str, Any] = {"input_features": randn(N, MEL_BINS, frames)}
    if mask is not None:
        inputs[mask] = first([frames, short] * SEQUENCES, frames).long()
    return fixed(sounds(*tokens), **inputs, **others)


def frames_first(*tokens: int, mel_bins: int = MEL_BINS) -> Form:
    """Spectrograms whose frames come before their values (Gemma)."""
    mask = first([FRAMES, SHORT] * SEQUENCES, FRAMES)
    features = randn(N, FRAMES, mel_bins)
    return fixed(sounds(*tokens), input_features=features, input_features_mask=mask)


def embedded(config: Any) -> Media:
    """Samples, cut into what is a token each (Gemma 4 Unified)."""
    features = randn(N, 6, config.audio_config.audio_embed_dim)
    mask = first([6, 4] * SEQUENCES, 6)
    return Media(sounds(6, 4), {"input_features": features, "input_features_mask": mask})


def without_text(_: Any) -> Media:
    """Spectrograms in the place of ids (Pop2Piano)."""
    mask = first([9, 7], 9).long()
    inputs = {"input_features": randn(SEQUENCES, 9, 32), "attention_mask": mask}
    return Media([], inputs, has_text=False)


def waveforms(_: Any) -> Media:
    """Samples, of which four are a token (VibeVoice)."""
    mask = torch.ones(SEQUENCES, 24, dtype=torch.bool)
    return Media([AUDIO] * 6, {"input_values": randn(SEQUENCES, 1, 24), "padding_mask": mask})


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
    **each("audioflamingo3 musicflamingo", spectrograms(8, 5)),
    "gemma3n": frames_first(8, 8),
    "gemma4": frames_first(8, 5, mel_bins=8),
    "gemma4_unified": embedded,
    "glmasr": spectrograms(4, 2),
    # two windows of 15 frames, of three tokens each, with a mask of tokens
    **each(
        "granite_speech granite_speech_plus",
        fixed(
            sounds(6, 4),
            input_features=randn(N, 30, MEL_BINS),
            input_features_mask=first([6, 4] * SEQUENCES, 6),
        ),
    ),
    # beside the mask of the samples that they were made of
    "moss_transcribe_diarize": spectrograms(
        4, 3, padding_mask=torch.ones(N, FRAMES, dtype=torch.long)
    ),
    "phi4_multimodal": fixed(
        sounds(4, 3),
        audio_input_features=randn(N, FRAMES, MEL_BINS),
        audio_embed_sizes=torch.tensor([4, 3] * SEQUENCES),
        audio_attention_mask=first([FRAMES, SHORT] * SEQUENCES, FRAMES),
    ),
    "pop2piano": without_text,
    **each("qwen2_5_omni_thinker qwen2_audio", spectrograms(8, 5, mask="feature_attention_mask")),
    "qwen3_asr": spectrograms(13, 8, frames=100, short=60),
    "qwen3_omni_moe_thinker": spectrograms(4, 3, mask="feature_attention_mask"),
    "vibevoice": diffused,
    "vibevoice_asr": waveforms,
    "voxtral": spectrograms(4, 4, mask=None),
}
