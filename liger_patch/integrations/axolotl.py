"""Axolotl's plugin: the model is patched once its adapters are on it.

    plugins: [liger_patch.integrations.axolotl.LigerPatchPlugin]
    liger_patch: true

Interface: ``axolotl.integrations.base.BasePlugin`` of Axolotl 0.19.
"""

from typing import Any

from axolotl.integrations.base import BasePlugin  # pyright: ignore[reportMissingImports]
from pydantic import BaseModel, model_validator

from liger_patch.apply import apply_patch, checked_layers
from liger_patch.patch.settings import LossSettings

RIVALS = [f"{kind}_cross_entropy" for kind in ("cut", "chunked", "liger", "liger_fused_linear")]
OPTIONS = ("layers", "chunk_mib", "checkpoint_offload")  # of ``apply_patch``


class LigerPatchArgs(BaseModel):
    """The plugin's keys: options of ``apply_patch``, checked before a model is loaded."""

    liger_patch: bool = False
    liger_patch_layers: bool | list[str] = True
    liger_patch_chunk_mib: float | None = None
    liger_patch_checkpoint_offload: bool | float = False

    @model_validator(mode="before")
    @classmethod
    def check_keys(cls, data: dict[str, Any]) -> dict[str, Any]:
        """Raise ValueError for a key that is not here, or where another fused loss is asked for."""
        keys = LigerPatchArgs.model_fields
        for name in data:
            if name.startswith("liger_patch") and name not in keys:
                raise ValueError(f"{name} is no key of liger_patch, expected one of {list(keys)}")
        for name in RIVALS:
            if data.get("liger_patch") and data.get(name):
                raise ValueError(f"liger_patch: true and {name}: true patch the same loss: use one")
        return data

    @model_validator(mode="after")
    def check_values(self) -> "LigerPatchArgs":
        """Raise ValueError where ``apply_patch`` would, for any model."""
        options = {name: getattr(self, f"liger_patch_{name}") for name in OPTIONS}
        LossSettings(chunk_mib=options.pop("chunk_mib"))
        checked_layers(**options)
        return self


class LigerPatchPlugin(BasePlugin):
    """Patches the model that Axolotl has loaded."""

    def get_input_args(self) -> str:
        return f"{__name__}.{LigerPatchArgs.__name__}"

    def post_model_load(self, cfg: Any, model: Any) -> None:
        if cfg.liger_patch:
            apply_patch(model, **{n: getattr(cfg, f"liger_patch_{n}") for n in OPTIONS})
