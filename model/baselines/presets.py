"""Every baseline by name, at about the cost of `model.gem.presets.public_s`.

Knows sizes. Does not know data. With a history of 100 events a sequence model has about the FLOPs of public_s; the models
without a sequence module, whose weights are read once an example, have about its dense parameters instead. DIN has its
paper's size, which is smaller.
"""

from __future__ import annotations

from collections.abc import Callable

from feature_store.layout import Layout
from model.baselines.dcnv2 import DcnConfig, DeepCrossNetwork
from model.baselines.din import DeepInterestNetwork, DinConfig
from model.baselines.frame import Baseline
from model.baselines.hstu import HstuConfig, HstuNetwork
from model.baselines.interformer import InterFormerConfig, InterFormerNetwork
from model.baselines.transformer import TransformerConfig, TransformerNetwork
from model.baselines.wukong import WukongConfig, WukongNetwork

PRESETS: dict[str, Callable[[Layout], Baseline]] = {
    "din": lambda layout: DeepInterestNetwork(DinConfig(), layout),
    "interformer": lambda layout: InterFormerNetwork(InterFormerConfig(), layout),
    "wukong": lambda layout: WukongNetwork(WukongConfig(), layout),
    "hstu": lambda layout: HstuNetwork(HstuConfig(), layout),
    "dcnv2": lambda layout: DeepCrossNetwork(DcnConfig(), layout),
    "transformer": lambda layout: TransformerNetwork(TransformerConfig(), layout),
}
"""The defaults of their configurations."""
