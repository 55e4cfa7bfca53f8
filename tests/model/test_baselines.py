"""Baselines: each against a plain transcription of its paper's equations, and all against what the frame promises."""

from __future__ import annotations

import math
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from feature_store.layout import Layout
from feature_store.replay import Replay
from feature_store.spec import load_spec
from feature_store.tables import Tables
from feature_store.world import DAY_MS, START_MS, WorldConfig, generate
from model.baselines.dcnv2 import DcnConfig, DeepAndCross, DeepCrossNetwork
from model.baselines.din import ActivationUnit, DeepInterestNetwork, DinConfig
from model.baselines.frame import Baseline, FrameConfig, forward_flops
from model.baselines.hstu import (
    HstuConfig,
    HstuLayer,
    HstuNetwork,
    look_up,
    look_up_reference,
    places,
    relations,
)
from model.baselines.interformer import (
    CrossArch,
    Gating,
    InteractionArch,
    InterFormerConfig,
    InterFormerNetwork,
    SequenceArch,
)
from model.baselines.presets import PRESETS
from model.baselines.transformer import EncoderLayer, TransformerConfig, TransformerNetwork
from model.baselines.wukong import WukongConfig, WukongLayer, WukongNetwork
from model.gem import flops
from model.gem.batch import Batch
from model.gem.foundation import FoundationModel
from model.gem.presets import public_s
from model.nn.jagged import jagged
from model.training.base_rates import base_logits
from model.training.loss import masked_bce
from model.training.rows import ReplayRows
from tests.model.world_batches import WORLD, batch_of, grouped, layout, rows_of

TINY = {"width": 16, "heads": 2, "id_width": 8, "bins": 4, "user_tokens": 2, "ad_tokens": 2, "hidden": 16, "max_events": 32}
SMALL: dict[str, Callable[[Layout], Baseline]] = {
    "din": lambda made: DeepInterestNetwork(DinConfig(**TINY, attention_hidden=8, deep=(16, 8)), made),  # type: ignore[arg-type]
    "interformer": lambda made: InterFormerNetwork(InterFormerConfig(**TINY, layers=2, generator_hidden=8), made),  # type: ignore[arg-type]
    "wukong": lambda made: WukongNetwork(WukongConfig(**TINY, layers=3, rank=4, mlp_hidden=16), made),  # type: ignore[arg-type]
    "hstu": lambda made: HstuNetwork(HstuConfig(**TINY, layers=2), made),  # type: ignore[arg-type]
    "dcnv2": lambda made: DeepCrossNetwork(DcnConfig(**TINY, cross_rank=8, deep=(16, 8)), made),  # type: ignore[arg-type]
    "transformer": lambda made: TransformerNetwork(TransformerConfig(**TINY, cross_rank=8, deep=(16, 8)), made),  # type: ignore[arg-type]
}
NAMES = sorted(SMALL)
F64 = torch.float64


def small(name: str, made: Layout | None = None) -> Baseline:
    torch.manual_seed(0)
    model = SMALL[name](made or layout())
    nn.init.normal_(model.heads.out)
    return model.eval()


def scores(model: Baseline, batch: object) -> Tensor:
    with torch.no_grad():
        return model(Batch.from_numpy(batch))  # type: ignore[arg-type]


def drawn(module: nn.Module) -> nn.Module:
    """In float64, every parameter drawn anew, biases too."""
    for parameter in module.to(F64).parameters():
        nn.init.normal_(parameter, std=0.4)
    return module


def norm(x: Tensor, eps: float = 1e-5) -> Tensor:
    mean = x.mean(-1, keepdim=True)
    return (x - mean) / ((x - mean).square().mean(-1, keepdim=True) + eps).sqrt()


def softmax_read(q: Tensor, k: Tensor, v: Tensor, heads: int) -> Tensor:
    """MHA before its output projection, one query, key and head at a time."""
    out, d = torch.zeros(len(q), v.shape[1], dtype=q.dtype), q.shape[1] // heads
    for h in range(heads):
        part = slice(h * d, (h + 1) * d)
        for i in range(len(q)):
            weight = torch.stack([torch.exp(q[i, part] @ k[j, part] / math.sqrt(d)) for j in range(len(k))])
            out[i, part] = sum(w * v[j, part] for j, w in enumerate(weight / weight.sum()))
    return out


def test_dcn_v2_crosses_as_its_equation_says_beside_the_deep_network() -> None:
    net, x0 = drawn(DeepAndCross(5, layers=2, rank=3, deep=(4, 2))), torch.randn(3, 5, dtype=F64)
    x = h = x0
    for v, u in zip(net.cross.v, net.cross.u, strict=True):
        w = u.weight @ v.weight  # W = U Vᵀ, of rank 3
        x = torch.stack([x0[n] * (w @ x[n] + u.bias) + x[n] for n in range(3)])
    for layer in (net.deep[0], net.deep[2]):
        h = (h @ layer.weight.T + layer.bias).clamp_min(0)
    torch.testing.assert_close(net(x0), torch.cat([x, h], dim=1))


@pytest.mark.parametrize("tokens", [3, 5])
def test_a_wukong_layer_is_its_equation_with_every_pair_of_tokens_spelled_out(tokens: int) -> None:
    config = WukongConfig(width=4, heads=1, factor_tokens=2, linear_tokens=3, rank=2, mlp_hidden=7)
    layer, x = drawn(WukongLayer(tokens, config)), torch.randn(2, tokens, 4, dtype=F64)
    assert (layer.shortcut is None) == (tokens == 5)
    first, activation, last = layer.blocks.mlp
    for n in range(2):
        products = torch.stack([torch.stack([x[n, i] @ x[n, j] for j in range(tokens)]) for i in range(tokens)])
        crossed = norm((products @ layer.blocks.y).flatten())
        fmb = (last.weight @ activation(first.weight @ crossed + first.bias) + last.bias).reshape(2, 4)
        lcb = layer.blocks.compress @ x[n]
        shortcut = x[n] if layer.shortcut is None else layer.shortcut @ x[n]
        torch.testing.assert_close(layer(x)[n], norm(torch.cat([fmb, lcb]) + shortcut))


def laid_out(lengths: list[int], shown: list[int], context: int) -> tuple[object, Tensor]:
    events = jagged(torch.tensor([0, *np.cumsum(lengths)]))
    request_N = torch.repeat_interleave(torch.arange(len(shown)), torch.tensor(shown))
    at = places(torch.tensor(lengths), (events.sequence, events.position), request_N, context=context)
    return at, request_N


def test_hstu_candidates_see_context_history_and_themselves_and_nothing_sees_them() -> None:
    at, _ = laid_out([2, 0], [2, 1], 2)
    assert at.visible[0].int().tolist() == [
        [1, 1, 1, 1, 0, 0],  # context reads all context and history
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 0, 0, 0],  # events are causal
        [1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 1, 0],
        [1, 1, 1, 1, 0, 1],
    ]
    assert at.visible[1, 2].int().tolist() == [1, 1, 1, 0, 0, 0]
    assert at.position.tolist() == [[0, 1, 2, 3, 4, 4], [0, 1, 2, 2, 2, 2]]
    assert at.context.tolist() == [0, 1, 6, 7]
    assert at.events.tolist() == [3, 2], "the newest event, which comes first in the history, lies last"
    assert at.candidates.tolist() == [4, 5, 8]


def test_an_hstu_layer_is_equations_one_to_three_one_pair_at_a_time() -> None:
    config = HstuConfig(width=4, heads=2, user_tokens=1, max_events=3)
    layer, (at, _) = drawn(HstuLayer(config)), laid_out([2, 3], [2, 1], 2)
    x, rows, size = torch.randn(2, 6, 4, dtype=F64), 2, 6
    seconds = torch.tensor([[900, 900, 0, 700, 900, 900], [9000, 9000, 0, 1, 8000, 9000]])
    out = layer(x, relations(at, seconds * 1000, config))
    for r in range(rows):
        mixed = nn.functional.silu(norm(x[r], 1e-6) @ layer.uvqk.weight.T + layer.uvqk.bias)
        u, v, q, k = mixed.split(4, dim=1)
        read = torch.zeros(size, 4, dtype=F64)
        for i in range(size):
            for j in range(size):
                if not at.visible[r, i, j]:
                    continue
                ago = max(1, int(seconds[r, i] - seconds[r, j]))
                apart = int(at.position[r, i] - at.position[r, j])
                rab = layer.bias.position[apart + config.longest - 1] + layer.bias.time[int(math.log(ago) / 0.301)]
                for h in (slice(0, 2), slice(2, 4)):
                    score = q[i, h] @ k[j, h] + rab
                    read[i, h] += score * torch.sigmoid(score) / config.longest * v[j, h]
        wanted = x[r] + (norm(read, 1e-6) * u) @ layer.out.weight.T + layer.out.bias
        torch.testing.assert_close(out[r], wanted)


def test_numbers_of_a_small_table_are_looked_up_with_the_values_and_gradients_of_an_index() -> None:
    index, upstream = torch.randint(0, 5, (3, 4, 4)), torch.randn(3, 4, 4)
    tables = [torch.arange(7.0, requires_grad=True) for _ in range(2)]
    made = [look(table, index) for look, table in zip((look_up, look_up_reference), tables, strict=True)]
    torch.testing.assert_close(*made)
    for found in made:
        found.backward(upstream)
    torch.testing.assert_close(tables[0].grad, tables[1].grad)


def test_din_weighs_every_event_by_its_activation_and_adds_them_up_without_softmax() -> None:
    model, batch = small("din"), Batch.from_numpy(batch_of([2, 0, 3], [1, 2, 2]))
    inputs, unit = model.inputs(batch), drawn(ActivationUnit(16, 8)).float()
    model.unit = unit
    first, activation, last = unit.score
    events = inputs.history.values_TD.split([2, 0, 3])
    for n, request in enumerate(inputs.request_N.tolist()):
        v, interest = model.target(inputs.ads_NaD[n].flatten()), torch.zeros(16)
        for e in events[request]:
            hidden = first.weight @ torch.cat([e, v, e * v, e - v]) + first.bias
            hidden = torch.where(hidden > 0, hidden, activation.weight * hidden)
            interest += (last.weight @ hidden + last.bias) * e
        torch.testing.assert_close(model.interest(inputs)[n], interest, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("gate", ["identity", "sigmoid", "tanh", "self"])
def test_interformer_gates_as_printed_or_by_itself(gate: str) -> None:
    gating, x = drawn(Gating(3, gate)), torch.randn(2, 2, 3, dtype=F64)  # type: ignore[arg-type]
    mlp = x @ gating.mlp.weight.T + gating.mlp.bias
    printed = x * mlp
    wanted = {"identity": printed, "sigmoid": 1 / (1 + (-printed).exp()), "tanh": printed.tanh(), "self": x / (1 + (-mlp).exp())}
    torch.testing.assert_close(gating(x), wanted[gate])


def interformer() -> InterFormerConfig:
    return InterFormerConfig(width=4, heads=1, user_tokens=1, ad_tokens=1, cls_tokens=2, generator_hidden=3)


def test_interformer_summarizes_by_cls_pooling_and_the_newest_events_of_which_missing_ones_are_zeros() -> None:
    config = interformer()
    arch, lengths = drawn(CrossArch(config)), [5, 3, 2]  # of CLS and events: the last has no event
    x, s = torch.randn(3, 3, 4, dtype=F64), torch.randn(3, 5, 4, dtype=F64)
    valid = torch.arange(5) < torch.tensor(lengths)[:, None]
    torch.testing.assert_close(arch.of_tokens(x)[0], arch.gate_x(arch.tokens @ x[0]))
    pool, made = arch.pooling, arch.of_sequence(s, valid)
    for n, length in enumerate(lengths):
        own = s[n, :length]
        k, v = (own @ pool.key_value.weight.T + pool.key_value.bias).split(4, dim=1)
        q = pool.queries @ pool.query.weight.T + pool.query.bias
        pma = softmax_read(q, k, v, 1) @ pool.out.weight.T + pool.out.bias
        recent = torch.zeros(2, 4, dtype=F64)
        recent[: min(2, length - 2)] = own[2:4]
        torch.testing.assert_close(made[n], arch.gate_s(torch.cat([own[:2], pma, recent])))


@pytest.mark.parametrize("residual", [False, True])
def test_interformer_attends_what_a_generated_matrix_made_of_each_event(residual: bool) -> None:
    config = InterFormerConfig(width=4, heads=1, user_tokens=1, ad_tokens=1, cls_tokens=2, generator_hidden=3, residual=residual)
    arch, x_sum, s = drawn(SequenceArch(config)), torch.randn(1, 2, 4, dtype=F64), torch.randn(1, 4, 4, dtype=F64)
    valid = torch.tensor([[True, True, True, False]])
    f, own = arch.generator(x_sum.flatten(1)).reshape(4, 4), s[0, :3]
    personal = torch.stack([f @ (norm(event) if residual else event) for event in own]) + (own if residual else 0)
    mixed = (norm(personal) if residual else personal) @ arch.qkv.weight.T + arch.qkv.bias
    q, k, v = (part.clone() for part in mixed.split(4, dim=1))
    for place in range(3):  # rotary: pair p turns by place · 10000^(−p/2)
        for pair, frequency in enumerate((1.0, 0.01)):
            c, n = math.cos(place * frequency), math.sin(place * frequency)
            turn = torch.tensor([[c, -n], [n, c]], dtype=F64)
            both = slice(2 * pair, 2 * pair + 2)
            q[place, both], k[place, both] = turn @ q[place, both].clone(), turn @ k[place, both].clone()
    wanted = softmax_read(q, k, v, 1) @ arch.out.weight.T + arch.out.bias + (personal if residual else 0)
    torch.testing.assert_close(arch(x_sum, s, valid)[0, :3], wanted, atol=1e-6, rtol=1e-6)  # turns are float32


def test_interformer_interacts_by_a_dhen_layer_of_dot_products_and_a_cross() -> None:
    arch = drawn(InteractionArch(interformer()))
    x, s_sum = torch.randn(2, 3, 4, dtype=F64), torch.randn(2, 6, 4, dtype=F64)
    for n in range(2):
        z = torch.cat([x[n], s_sum[n]])
        dots = torch.stack([z[i] @ z[j] for i in range(9) for j in range(i + 1, 9)])
        flat, cross = z.flatten(), arch.cross
        crossed = flat * (cross.u[0].weight @ (cross.v[0].weight @ flat) + cross.u[0].bias) + flat
        wanted = arch.mlp(norm((arch.dot(dots) + crossed + flat).reshape(9, 4)).flatten()).reshape(3, 4)
        torch.testing.assert_close(arch(x, s_sum)[n], wanted)


def test_an_interformer_layer_reads_the_summaries_of_the_layer_before_and_the_heads_those_of_the_last() -> None:
    model, batch = small("interformer"), Batch.from_numpy(batch_of([3], [1]))
    inputs, (c0, c1, c2) = model.inputs(batch), model.crosses
    (i0, i1), (s0, s1) = model.interactions, model.sequences
    x0 = torch.cat([inputs.context_RcD[0], inputs.ads_NaD[0]])[None]
    first = torch.cat([c0.of_tokens(x0), inputs.history.values_TD[None]], dim=1)
    valid = torch.ones(1, first.shape[1], dtype=torch.bool)
    x1, second = i0(x0, c0.of_sequence(first, valid)), s0(c0.of_tokens(x0), first, valid)
    x2, third = i1(x1, c1.of_sequence(second, valid)), s1(c1.of_tokens(x1), second, valid)
    wanted = torch.cat([c2.of_tokens(x2), c2.of_sequence(third, valid)], dim=1).flatten(1)
    torch.testing.assert_close(model.represent(inputs), wanted)


def test_an_encoder_layer_is_torchs_own_post_norm_layer() -> None:
    own, other = EncoderLayer(8, heads=2, feed_forward=12), nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    with torch.no_grad():
        for mine, theirs in (
            (own.qkv.weight, other.self_attn.in_proj_weight), (own.qkv.bias, other.self_attn.in_proj_bias),
            (own.out.weight, other.self_attn.out_proj.weight), (own.out.bias, other.self_attn.out_proj.bias),
            (own.feed_forward[0].weight, other.linear1.weight), (own.feed_forward[0].bias, other.linear1.bias),
            (own.feed_forward[2].weight, other.linear2.weight), (own.feed_forward[2].bias, other.linear2.bias),
        ):  # fmt: skip
            theirs.copy_(mine)
    x, valid = torch.randn(2, 5, 8), torch.arange(5) < torch.tensor([[5], [3]])
    torch.testing.assert_close(own(x, valid)[valid], other(x, src_key_padding_mask=~valid)[valid])


@pytest.mark.parametrize("name", NAMES)
def test_a_score_depends_on_its_own_request_and_candidate_only(name: str) -> None:
    model, batch = small(name), batch_of([5, 0, 17], [3, 2, 4])
    whole, alone = scores(model, batch), []
    for request in range(3):
        own = rows_of(batch, request)
        for candidate in range(own.num_candidates):
            kept = {field: value[[candidate]] for field, value in own._asdict().items() if field.startswith(("ad_", "pair_"))}
            alone.append(scores(model, own._replace(**kept, candidate_offsets=np.array([0, 1]))))
    torch.testing.assert_close(torch.cat(alone), whole, atol=1e-5, rtol=1e-5)
    assert whole.std(0).min() > 1e-3, "scores differ, so that the comparison says something"


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("lengths", "shown"), [([], []), ([3], [0]), ([0], [2]), ([2, 3], [0, 5]), ([0, 40], [1, 1])])
def test_empty_batches_histories_and_requests_have_scores_of_the_right_shape(
    name: str, lengths: list[int], shown: list[int]
) -> None:
    made = scores(small(name), batch_of(lengths, shown))
    assert made.shape == (sum(shown), 3)
    assert torch.isfinite(made).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_score_reads_the_oldest_event_that_is_kept_and_none_before(name: str) -> None:
    model, batch = small(name), batch_of([33], [1])
    base = scores(model, batch)
    for event, matters in ((0, False), (1, True)):
        ids = batch.event_ids.copy()
        ids[event] += 1000
        assert (not torch.equal(scores(model, batch._replace(event_ids=ids)), base)) == matters


@pytest.mark.parametrize("name", NAMES)
def test_sources_of_other_merge_groups_are_in_the_same_stream(name: str) -> None:
    batch = batch_of([9, 4], [2, 1])
    torch.testing.assert_close(scores(small(name, grouped()), batch), scores(small(name), batch))


@pytest.mark.parametrize("name", NAMES)
def test_every_parameter_gets_a_gradient(name: str) -> None:
    model, batch = small(name), Batch.from_numpy(batch_of([7, 3, 12], [2, 1, 3]))
    (model(batch) * torch.randn(6, 3)).sum().backward()
    assert [n for n, p in model.named_parameters() if p.grad is None or not float(p.grad.abs().sum()) > 0] == []


@pytest.mark.parametrize("name", NAMES)
def test_analytic_flops_equal_what_torch_counts(name: str) -> None:
    model, batch = small(name), batch_of([16, 16], [3, 3])
    batch = batch._replace(event_source=np.tile(np.repeat([0, 1], 8), 2).astype(np.int32))
    with FlopCounterMode(display=False) as counter, torch.nn.attention.sdpa_kernel(torch.nn.attention.SDPBackend.MATH):
        scores(model, batch)
    assert forward_flops(model, batch) == counter.get_total_flops()


@pytest.mark.parametrize("name", [name for name in NAMES if name != "din"])
def test_a_preset_costs_about_what_public_s_costs(name: str) -> None:
    """With 100 events: FLOPs where a history is encoded, dense parameters where it is a bag. DIN has its paper's size."""
    batch = batch_of([100], [1])
    with torch.device("meta"):
        other, model = FoundationModel(public_s(), layout()), PRESETS[name](layout())
    dense = [sum(p.numel() for n, p in m.named_parameters() if not n.startswith("embeddings.")) for m in (model, other)]
    costs = dense if name in ("wukong", "dcnv2") else [forward_flops(model, batch), flops.forward_flops(other, batch)]
    assert costs[0] / costs[1] == pytest.approx(1.0, abs=0.25)


@pytest.mark.parametrize(
    ("config", "sizes", "said"),
    [
        (FrameConfig, {"width": 30}, "width 30 is not divisible"),
        (FrameConfig, {"ad_tokens": 0}, "ad_tokens is 0"),
        (DinConfig, {"deep": (8, 0)}, "deep is"),
        (DcnConfig, {"deep": ()}, "deep is"),
        (DcnConfig, {"cross_rank": 0}, "cross_rank is 0"),
        (WukongConfig, {"rank": 0}, "rank is 0"),
        (HstuConfig, {"layers": 0}, "layers is 0"),
        (TransformerConfig, {"feed_forward": 0}, "feed_forward is 0"),
        (InterFormerConfig, {"recent_tokens": -1}, "recent_tokens is -1"),
        (InterFormerConfig, {"gate": "relu"}, "gate is 'relu'"),
    ],
)
def test_a_configuration_refuses_what_does_not_fit(config: type[FrameConfig], sizes: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said):
        config(**sizes)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> ReplayRows:
    torch.set_num_threads(1)
    tables = Tables(tmp_path_factory.mktemp("world"))
    generate(WorldConfig(users=40, ads=60, days=5, requests_per_user=8.0), tables)
    return ReplayRows(Replay(load_spec(Path(WORLD)), tables), START_MS, START_MS + 5 * DAY_MS)


@pytest.mark.parametrize("name", NAMES)
def test_two_hundred_steps_on_a_generated_world_learn_more_than_its_base_rates(name: str, rows: ReplayRows) -> None:
    torch.manual_seed(0)
    model, samples = SMALL[name](rows.replay.layout), rows.samples(1024)
    model.fit_statistics(batch for batch, _ in samples)
    model.start_at(base_logits(samples, len(rows.replay.spec.surfaces)))
    optimizer, rng, losses = torch.optim.Adam(model.parameters(), lr=3e-3), np.random.default_rng(0), []
    for step in range(201):
        chosen = np.arange(len(rows)) if step in (0, 200) else np.sort(rng.integers(0, len(rows), 16))
        batch, targets = rows.batch(chosen)
        model.train(step not in (0, 200))
        sums = masked_bce(
            model(Batch.from_numpy(batch)), torch.from_numpy(targets.labels), torch.from_numpy(targets.label_mask)
        )
        loss = sums.means().sum()
        losses.append(float(loss.detach()))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    assert losses[-1] < 0.97 * losses[0], "the first loss is that of the base rates"
