"""Images for the smallest models: IMAGES says what the processor of each row makes of them.

Each sequence has two, of different sizes where a model takes such.
"""

from __future__ import annotations

import math
from typing import Any

import torch
import transformers
from tiny_configurations import (
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
from tiny_media import SEQUENCES, Form, Media, N, first, randn
from torch import Tensor

SIDE = IMAGE_SIZE // PATCH_SIZE  # patches
GRIDS = [(SIDE, SIDE), (MERGE_SIZE, SIDE)]  # of the images of a sequence: rows and columns
PATCHES = SEQUENCES * sum(rows * columns for rows, columns in GRIDS)
PATCH_VALUES = 3 * PATCH_SIZE**2
MERGED = [rows * columns // MERGE_SIZE**2 for rows, columns in GRIDS]  # tokens of each image


def images(*tokens: int) -> list[int]:
    """The ids of images of so many tokens."""
    return [i for n in tokens for i in (VISION_START, *[IMAGE] * n, VISION_END)]


def pictures(tokens: int, *others: str) -> Form:
    """Images of one size, the same under other names too."""
    values = {name: randn(N, 3, IMAGE_SIZE, IMAGE_SIZE) for name in ("pixel_values", *others)}
    return lambda _: Media(images(tokens, tokens), values)


def half_masked(*shape: int) -> Tensor:
    """(*shape, IMAGE_SIZE, IMAGE_SIZE) False in the lower half of each sequence's second image."""
    mask = torch.ones(SEQUENCES, 2, IMAGE_SIZE, IMAGE_SIZE, dtype=torch.bool)
    mask[:, 1, IMAGE_SIZE // 2 :] = False
    return mask.view(*shape, IMAGE_SIZE, IMAGE_SIZE)


def masked(_: Any) -> Media:
    """Images with a mask of their pixels (Aria)."""
    pixels = randn(N, 3, IMAGE_SIZE, IMAGE_SIZE)
    return Media(images(4, 4), {"pixel_values": pixels, "pixel_mask": half_masked(N)})


def masked_by_sequence(_: Any) -> Media:
    """The same with a dimension of the images of one sequence (Idefics)."""
    pixels = randn(SEQUENCES, 2, 3, IMAGE_SIZE, IMAGE_SIZE)
    mask = half_masked(SEQUENCES, 2)
    return Media(images(4, 4), {"pixel_values": pixels, "pixel_attention_mask": mask})


def sized(*tokens: int) -> Form:
    """Images in one tensor, with their sizes in pixels."""
    sizes = torch.tensor(GRIDS * SEQUENCES) * PATCH_SIZE
    pixels = randn(N, 3, IMAGE_SIZE, IMAGE_SIZE)
    return lambda _: Media(images(*tokens), {"pixel_values": pixels, "image_sizes": sizes})


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
    pixels = media.inputs["pixel_values"].view(PATCHES, 3, PATCH_SIZE, PATCH_SIZE)
    return media._replace(inputs=media.inputs | {"pixel_values": pixels})


def merged_grids(config: Any) -> Media:
    """The same with the number of patches to merge, for each image (VideoLLaMA 3)."""
    media = grids(config)
    sizes = {"image_merge_sizes": torch.tensor([MERGE_SIZE, 1] * SEQUENCES)}
    return Media(images(MERGED[0], math.prod(GRIDS[1])), media.inputs | sizes)


def positions(merge: int, side: int = SIDE) -> Form:
    """Patches of each image with their positions, -1 in padding (Gemma 4)."""
    values = PATCH_VALUES * (SIDE // side) ** 2
    grid = torch.cartesian_prod(torch.arange(side), torch.arange(side))
    padded = grid.clone()
    padded[side**2 // 2 :] = -1
    inputs = {
        "pixel_values": randn(N, side**2, values),
        "image_position_ids": torch.stack([grid, padded] * SEQUENCES),
    }
    tokens = side**2 // merge**2
    return lambda _: Media(images(tokens, tokens // 2), inputs)


def padded_patches(_: Any) -> Media:
    """Patches of each image, padded, with the shapes of the images (LFM2-VL)."""
    lengths = [rows * columns for rows, columns in GRIDS] * SEQUENCES
    inputs = {
        "pixel_values": randn(N, SIDE**2, PATCH_VALUES),
        "spatial_shapes": torch.tensor(GRIDS * SEQUENCES),
        "pixel_attention_mask": first(lengths, SIDE**2).long(),
    }
    return Media(images(*MERGED), inputs)


def one_row(merge: int) -> Form:
    """Patches of all images beside each other in one row (MiniCPM-V)."""
    sizes = [(SIDE, SIDE), (SIDE, 2 * SIDE)]
    patches = [rows * columns for rows, columns in sizes]
    inputs = {
        "pixel_values": randn(1, 3, PATCH_SIZE, SEQUENCES * sum(patches) * PATCH_SIZE),
        "target_sizes": torch.tensor(sizes * SEQUENCES, dtype=torch.int32),
    }
    return lambda _: Media(images(*(number // merge**2 for number in patches)), inputs)


# An image (8, 32) in two tiles of 16 x 16 and one of the whole: the tokens of the whole, and those
# of the rows that the image fills in the tiles, each with a newline.
TILED = SIDE**2 + SIDE // 2 * (2 * SIDE + 1)


def tiles(**others: Any) -> Form:
    """One image for each sequence, in tiles (LLaVA-NeXT)."""
    inputs = {
        "pixel_values": randn(SEQUENCES, 3, 3, IMAGE_SIZE, IMAGE_SIZE),
        "image_sizes": torch.tensor([[IMAGE_SIZE // 2, 2 * IMAGE_SIZE]] * SEQUENCES),
        **others,
    }
    return lambda _: Media(images(TILED), inputs)


def with_video(form: Form, tokens: int) -> Form:
    """The form with a video of two frames for each sequence, of so many tokens."""
    video = {"pixel_values_videos": randn(SEQUENCES, 2, 3, IMAGE_SIZE, IMAGE_SIZE, seed=1)}

    def both(config: Any) -> Media:
        media = form(config)
        prompt = [*media.prompt, *[VIDEO] * tokens]
        return Media(prompt, media.inputs | video)

    return both


def padded_tiles(_: Any) -> Media:
    """Two tiles for each sequence, and one of padding (Granite Docling)."""
    pixels = randn(SEQUENCES, 3, 3, IMAGE_SIZE, IMAGE_SIZE)
    mask = first([2] * SEQUENCES, 3)
    return Media(images(4, 4), {"pixel_values": pixels, "pixel_attention_mask": mask})


def crops(**others: Any) -> Form:
    """Images with crops of the first image of each sequence (Step 3.7)."""
    inputs = {
        "pixel_values": randn(N, 3, IMAGE_SIZE, IMAGE_SIZE),
        "pixel_values_local": randn(2 * SEQUENCES, 3, IMAGE_SIZE, IMAGE_SIZE, seed=1),
        "num_local_patches": [2, 0] * SEQUENCES,
        **others,
    }
    return lambda _: Media(images(3, 1), inputs)


def newlined_crops(config: Any) -> Media:
    """Crops in rows: a newline ends each row, a separator each image (Unlimited-OCR)."""
    media = crops(patches_grid=[[2, 1], [0, 0]] * SEQUENCES)(config)
    return media._replace(prompt=images(3 + 2 + 1, 2 + 1))


def cross_attended(_: Any) -> Media:
    """Images in one tile and in two, which the text attends to (Llama 3.2)."""
    tiles = first([1, 2] * SEQUENCES, NUM_TILES).long().view(SEQUENCES, 2, NUM_TILES)
    inputs = {
        "pixel_values": randn(SEQUENCES, 2, NUM_TILES, 3, IMAGE_SIZE, IMAGE_SIZE),
        "aspect_ratio_ids": torch.tensor([[1, 2]] * SEQUENCES),
        "aspect_ratio_mask": tiles,
    }
    mask = {"cross_attention_mask": (tiles[0], tiles[0])}
    return Media([IMAGE] * 2, inputs, mask)


def unencoded_patches(_: Any) -> Media:
    """Patches that no tower encodes (Fuyu)."""
    name = "image_patches" if transformers.__version__.startswith("5.0.") else "pixel_values"
    return Media([IMAGE] * SIDE**2, {name: randn(SEQUENCES, SIDE**2, PATCH_VALUES)})


def patches_with_places(_: Any) -> Media:
    """Patches with their rows and columns in front, counted from 1 (KOSMOS-2.5)."""
    grid = torch.cartesian_prod(torch.arange(1, SIDE + 1), torch.arange(1, SIDE + 1))
    places = grid.expand(SEQUENCES, -1, -1)
    patches = torch.cat([places, randn(SEQUENCES, SIDE**2, PATCH_VALUES)], -1)
    return Media(
        [IMAGE] * 4, {"flattened_patches": patches}, {"image_embeds_position_mask": (1, 0)}
    )


def ovis(_: Any) -> Media:
    """One image for each sequence, between tokens that the tower embeds too."""
    pixels = randn(SEQUENCES, 3, IMAGE_SIZE, IMAGE_SIZE)
    return Media([VISION_START, *[IMAGE] * SIDE**2, VISION_END], {"pixel_values": pixels})


def phi4_images(_: Any) -> Media:
    """A whole image and two crops beside each other, pooled; newlines and a separator."""
    inputs = {
        "image_pixel_values": randn(SEQUENCES, 3, 3, IMAGE_SIZE, IMAGE_SIZE),
        "image_sizes": torch.tensor([[IMAGE_SIZE, 2 * IMAGE_SIZE]] * SEQUENCES),
        "image_attention_mask": torch.ones(SEQUENCES, 3, SIDE, SIDE, dtype=torch.bool),
    }
    pooled = SIDE // 2
    return Media(images(pooled * (2 * pooled + 1) + 1 + pooled * (pooled + 1)), inputs)


IMAGES: dict[str, Form] = {
    **each("lighton_ocr mistral3 mistral_large4", sized(*MERGED)),
    **each("idefics2 idefics3 smolvlm", masked_by_sequence),
    **each("aya_vision cohere2_vision internvl llama4 qianfan_ocr", pictures(4)),
    **each("deepseek_vl gemma3 gemma3n janus llava paligemma t5gemma2 vipllava", pictures(16)),
    **each(
        "cohere_compass cosmos3_edge cosmos3_omni ernie4_5_vl_moe exaone4_5 glm46v glm4v"
        " glm4v_moe glm_ocr hyperclovax_vision_v2 lfm3_vl minimax_m3_vl muse_glimmer"
        " qwen2_5_omni_thinker qwen2_5_vl qwen2_vl qwen3_5 qwen3_5_moe qwen3_omni_moe_thinker"
        " qwen3_vl qwen3_vl_moe qwen4_exp",
        grids,
    ),
    "aria": masked,
    "deepseek_vl_hybrid": pictures(16, "high_res_pixel_values"),
    "emu3": sized(4 * 5, 2 * 5),
    "fuyu": unencoded_patches,
    "gemma4": positions(2),
    "gemma4_unified": positions(1, SIDE // MERGE_SIZE),
    "got_ocr2": pictures(1),
    "granite_docling": padded_tiles,
    "kimi_k25": square_patches,
    "kosmos-2.5": patches_with_places,
    "lfm2_vl": padded_patches,
    "llava_next": tiles(),
    "llava_next_video": with_video(tiles(), 2 * 4),
    "llava_onevision": with_video(
        tiles(batch_num_images=torch.ones(2, dtype=torch.long)), 2 * 4 + 1
    ),
    "minicpm_ocr": one_row(2),
    "minicpmv4_6": one_row(4),
    "minicpmv4_7": one_row(4),
    "mllama": cross_attended,
    "ovis2": ovis,
    "paddleocr_vl": square_patches,
    "phi4_multimodal": phi4_images,
    "step3p7": crops(),
    "unlimited_ocr": newlined_crops,
    "video_llama_3": merged_grids,
    "video_llava": with_video(pictures(16), 2 * 17),
}
