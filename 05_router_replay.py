"""Lesson 5: why is a mixture's gap larger, and what does replaying the router change?

In a dense policy a small numerical difference stays small. In a mixture of experts the router of
each layer picks k of E experts for a token. That choice is a pick: one set of k experts. No pick
changes gradually. Where two experts are nearly tied, rounding decides, and the token goes through
other matrices in the engine than in the trainer: the pick flips.

Router replay (R3, arXiv 2510.11370) takes the sampler's picks into the trainer:

    p = softmax(W x)                 the router, at the trainer's weights and activations
    I = the k largest of p           the pick if live;     I = the sampler's pick     if replayed
    g_i = p_i / sum_{j in I} p_j     gates, from the trainer's p: gradients reach the router
    y = sum_{i in I} g_i expert_i(x)

R2 (MiniRL, arXiv 2512.01374) replays what the trainer itself picks at the sampler's weights. It
leaves the engine's part of the gap, but keeps a response's experts fixed while the weights move on.

  python 05_router_replay.py            a CPU: a minute; a tiny Qwen3-MoE and lesson 1's policy;
                                        the same on a GPU (not run yet)
  python 05_router_replay.py --model M  another mixture with softmax gates (Qwen, Mixtral, OLMoE).
                                        `jump` needs 42 bytes per parameter, so M must be small
  python figures/study.py 05            training under no replay, R2 and R3: half an hour

Expect half a percent of the picks to flip between a bf16 engine and an fp32 trainer. These few make
half of k3 or more, lesson 1's estimate of KL(mu || pi). Replay removes their part and leaves the
rest, twice that of a dense policy. Exercises: tests/EXERCISES.md.
"""
import copy
from contextlib import contextmanager
from importlib import import_module

import numpy as np

lesson1 = import_module("01_mismatch")   # before torch: it sets up torch's environment
lesson3 = import_module("03_decompose")
import torch
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from tqdm import tqdm

MIXTURE = {**lesson1.ARCHITECTURE, "model_type": "qwen3_moe", "num_hidden_layers": 3,
           "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
           "norm_topk_prob": True}
NOISE = 0.02           # relative parameter noise in the engine: an amplified discrepancy
SIZES = {              # prompts, seeds of the sampling, longest response, learning rate
    "tiny": (512, 4, 9, 1.5e-3), "gpu": (64, 2, 256, 1e-6), "cpu": (8, 2, 32, 1e-6)}


# ---------------------------------------------------------------- the gates
def gates(router_logits: Tensor, picks: Tensor, normalized: bool) -> Tensor:
    """Gates (n, k) in float32 of n picks (n, k), from a router's logits (n, E). normalized: whether
    a token's k gates sum to 1. transformers has routers of both forms."""
    logits = router_logits.float()
    if normalized:
        # g_i = p_i / sum_{j in I} p_j, which is the softmax over the logits of I alone
        return logits.gather(-1, picks).softmax(-1)
    # g_i = p_i
    return logits.softmax(-1).gather(-1, picks)


# ---------------------------------------------------------------- the routers of a model
# In transformers a router returns (logits (n, E), gates (n, k), picks (n, k)) for the n = B (P + T)
# input tokens. A forward hook can put other gates and picks in their place. Routes are the picks of
# all L routers, (B, P + T, L, k).
def is_mixture(config) -> bool:
    """Is this the configuration of a mixture of experts?"""
    names = "num_experts", "num_local_experts", "n_routed_experts"
    return any(getattr(config.get_text_config(), name, 0) for name in names)


def routers(model) -> list:
    """The model's routers, layer by layer. Raises ValueError where there are none."""
    layers = getattr(getattr(model, "model", None), "layers", [])
    found = [getattr(getattr(layer, "mlp", None), "gate", None) for layer in layers]
    found = [router for router in found if hasattr(router, "top_k")]
    if not found:
        raise ValueError(f"{type(model).__name__} has no router to replay: it is dense, or not "
                         "built like Qwen's mixtures of experts")
    return found


@contextmanager
def hooked(model, hook):
    """Within it a router's output becomes hook(layer, output), or stays if that is None. Afterwards
    the hooks are gone, even after an exception."""
    handles = []
    try:
        for layer, router in enumerate(routers(model)):
            handles.append(router.register_forward_hook(
                lambda router, inputs, output, layer=layer: hook(layer, output)))
        yield
    finally:
        for handle in handles:
            handle.remove()


@torch.no_grad()
def normalizes(model) -> bool:
    """Do a token's gates sum to 1 in this model? Tried on 64 tokens, once per model. Raises
    ValueError if the router computes neither form of `gates`, since replaying even its own picks
    would change it: sigmoids (DeepSeek-V3, GLM-4-MoE, dots1), scaled gates."""
    if hasattr(model, "gates_sum_to_1"):
        return model.gates_sum_to_1
    outputs, V = [], lesson1.vocabulary(model)
    with hooked(model, lambda layer, output: outputs.append(output)):
        model(input_ids=torch.arange(64, device=lesson1.DEVICE)[None] % V, use_cache=False)
    for form in (True, False):
        errors = [(gates(logits, picks, form).to(own.dtype) - own).abs().max().item()
                  for logits, own, picks in outputs]
        if max(errors) <= max(1e-6, 2 * torch.finfo(outputs[0][1].dtype).eps):
            model.gates_sum_to_1 = form
            return form
    raise ValueError(f"{type(routers(model)[0]).__name__} cannot be replayed: "
                     "its gates are not the softmax of its logits")


# ---------------------------------------------------------------- replay
def check_routes(model, routes: Tensor | None, real: Tensor | None = None) -> None:
    """Raises ValueError with one line if these routes cannot be the model's: not recorded, not
    int64 (B, P + T, L, k), not of its experts, or an expert twice in one pick where `real`
    (B, P + T) is True. Elsewhere nothing went into the engine, and any experts may stand."""
    normalizes(model)
    found = routers(model)
    L, k, E = len(found), found[0].top_k, found[0].num_experts
    if routes is None:
        raise ValueError("no routes were recorded: sample a mixture by lesson 5's RoutedSampler")
    if routes.dim() != 4 or routes.shape[2:] != (L, k) or routes.dtype != torch.int64:
        raise ValueError(f"routes are {routes.dtype} {tuple(routes.shape)}, but this model needs "
                         f"int64 (B, P + T, {L} layers, {k} experts per token)")
    ordered = routes.sort(-1).values
    wrong = (ordered[..., 0] < 0) | (ordered[..., -1] >= E)                     # (B, P + T, L)
    if real is not None:
        wrong |= (ordered[..., 1:] == ordered[..., :-1]).any(-1) & real[..., None]
    if wrong.any():
        row, token, layer = wrong.nonzero()[0].tolist()
        raise ValueError(f"row {row}, input token {token}, layer {layer}: the pick "
                         f"{routes[row, token, layer].tolist()} is not {k} of {E} experts")


def replay(model, routes: Tensor):
    """Within it the model's picks are `routes` (B, P + T, L, k), with gates from its own logits.
    Under activation checkpointing the backward pass must stand within it too. Raises ValueError for
    routes that check_routes refuses, or that are for another number of input tokens."""
    check_routes(model, routes)
    picks, normalized = routes.flatten(0, 1), normalizes(model)                 # (n, L, k)
    def hook(layer: int, output):
        logits, own, _ = output
        if len(logits) != len(picks):
            raise ValueError(f"routes for {len(picks)} input tokens, but there are {len(logits)}")
        g = gates(logits, picks[:, layer], normalized)
        return logits, g.to(own.dtype), picks[:, layer]
    return hooked(model, hook)


@torch.no_grad()
def own_routes(model, rollout) -> Tensor:
    """The model's own routes on a rollout's tokens, (B, P + T, L, k)."""
    normalizes(model)                        # refuses routers that return something else
    parts = []
    for rows in lesson1.micro_batches(rollout, lesson1.vocabulary(model)):
        part, layers = rollout[rows], []
        with hooked(model, lambda layer, output: layers.append(output[2])):
            lesson1.response_logits(model, part)
        parts.append(torch.stack(layers, 1).unflatten(0, (len(part), -1)))
    return torch.cat(parts)


def routes_for(kind: str, old, rollout) -> Tensor | None:
    """The routes to replay: nothing ("none"), those of `old`, the trainer at the sampler's weights
    ("r2"), or the sampler's ("r3"). Raises ValueError if these cannot be the model's."""
    if kind == "none":
        return None
    if kind == "r2":
        return own_routes(old, rollout)
    # neither padding nor a response's last token ever goes into the engine
    real = torch.cat([rollout.prompt_mask, rollout.mask], 1)                    # (B, P + T)
    check_routes(old, rollout.routes, real & torch.nn.functional.pad(real[:, 1:], (0, 1)))
    return rollout.routes


def logprobs(model, rollout, routes: Tensor | None = None, head: bool = False, grad: bool = False):
    """Lesson 1's `logprobs`, with `routes` replayed if there are any."""
    if routes is None:
        return lesson1.logprobs(model, rollout, head, grad)
    parts = lesson1.micro_batches(rollout, lesson1.vocabulary(model))

    def one_part(rows: slice):
        with replay(model, routes[rows]):
            return lesson1.logprobs(model, rollout[rows], head, grad)
    if grad and len(parts) > 1:              # the backward pass computes each anew, replayed again
        results = [checkpoint(one_part, rows, use_reentrant=False) for rows in parts]
    else:
        results = [one_part(rows) for rows in parts]
    return tuple(map(torch.cat, zip(*results))) if head else torch.cat(results)


# ---------------------------------------------------------------- the engine that records its picks
class RoutedSampler(lesson1.Sampler):
    """vLLM around a mixture, with routes recorded. It must be its process' first engine, unless all
    earlier ones were stopped: vLLM makes the experts' process group with the first or never."""
    settings = {"enable_return_routed_experts": True,
                "enable_prefix_caching": False}          # a cached prefix has no routes

    @staticmethod
    def pack(prompts: list[list[int]], completions: list, *described):
        """Lesson 1's `pack`, with routes: one row of experts for each token but the last, which
        never went into the model. Raises ValueError for any other number of rows."""
        rollout = lesson1.pack(prompts, completions, *described)
        B, P, T = *rollout.prompt_ids.shape, rollout.ids.shape[1]
        routes = np.zeros((B, P + T, *completions[0].routed_experts.shape[1:]), np.int64)
        for i, (prompt, completion) in enumerate(zip(prompts, completions)):
            rows, n = completion.routed_experts, len(prompt) + len(completion.token_ids) - 1
            if len(rows) != n:
                raise ValueError(f"response {i}: {n} input tokens, but routes for {len(rows)}")
            routes[i, P - len(prompt):][:n] = rows
        return lesson1.replace(rollout, routes=torch.from_numpy(routes).to(lesson1.DEVICE))

    def load(self, state: dict) -> None:
        super().load(state)
        if lesson1.DEVICE.type == "cpu":
            self.llm.apply_model(pack_experts)


def pack_experts(model) -> None:
    """Puts the experts' matrices into the layout of vLLM's CPU kernel. reload_weights (0.30.0)
    silently skips this step. Then log-probs are .2 nats off, which the canary sees."""
    for layer in model.modules():
        if hasattr(layer, "w13_weight"):
            layer.quant_method.moe_kernel.fused_experts.process_weights_after_loading(layer)


# ---------------------------------------------------------------- the measures
def flips(routes: Tensor, others: Tensor, rollout) -> Tensor:
    """(n, L): in how many of its k experts a pick differs between two routes (B, P + T, L, k), for
    the n input tokens whose logits predict a response token. The pick flips where this is not 0."""
    P = rollout.prompt_ids.shape[1]
    a, b = (x[:, P - 1:-1][rollout.mask] for x in (routes, others))             # (n, L, k)
    return a.shape[-1] - (a[..., :, None] == b[..., None, :]).any(-1).sum(-1)


def beyond(d: Tensor, tau: float) -> float:
    """F(tau): the share of tokens whose ratio exp(d), or its inverse, exceeds tau (R3)."""
    return (d.abs() > np.log(tau)).double().mean().item()


def gap_row(seeds: list) -> dict:
    """The gap as a mean over seeds, ± their standard deviation, from [(log pi, log mu)], (n,)."""
    each = []
    for logp, mu in seeds:
        d = (logp - mu).double()
        each.append({**lesson1.gap(logp, mu), "F(1.1)": beyond(d, 1.1), "F(2)": beyond(d, 2)})
    row = {"tokens": sum(len(logp) for logp, _ in seeds), "max": max(gap["max"] for gap in each),
           "k3 by seed": [gap["k3"] for gap in each]}
    for key in ("mean |d|", "rms", "k3", "F(1.1)", "F(2)"):
        values = [gap[key] for gap in each]
        row |= {key: float(np.mean(values)), f"{key} ±": float(np.std(values, ddof=1))}
    return row


def flip_row(d: Tensor, flipped: Tensor) -> dict:
    """Where picks flip, and where the gap is. d (n,); flipped (n, L) as `flips` returns it."""
    by_layer, touched = (flipped > 0).double().mean(0), (flipped > 0).any(1)
    return {"picks that flip": by_layer.mean().item(), "by layer": by_layer.tolist(),
            "experts per token": flipped.sum(1).double().mean().item(),
            "tokens with a flip": touched.double().mean().item(),
            # 1 - prod_l (1 - share of layer l)
            "if layers are independent": (1 - (1 - by_layer).prod()).item(),
            "rms d: no flip": lesson3.rms(d[~touched].double()),
            "rms d: flip": lesson3.rms(d[touched].double())}


# ---------------------------------------------------------------- experiment 1: the gap
def sample_and_step(trainer, engine, tokenizer, n: int, max_tokens: int, seed: list):
    """n prompts, their responses right after a sync, the trainer one optimizer step later."""
    rng, lr = np.random.default_rng(seed[0]), SIZES[lesson1.scale(tokenizer)][-1]
    digits, prompts = lesson1.make_prompts(lesson1.SUM, tokenizer, n, rng)
    engine.sync(trainer)
    rollout = engine.sample(prompts, max_tokens, seed=seed)
    R = lesson1.rewards(lesson1.SUM, digits, rollout, tokenizer)
    return prompts, rollout, lesson1.one_step(copy.deepcopy(trainer), rollout, R, lr)


def one_policy(path, trainer, engine, tokenizer, seed: int, quick: bool) -> list[dict]:
    """The gap as it naturally is, one optimizer step after the sync, and with noise in the engine's
    parameters. For a mixture also with replay."""
    n, seeds, max_tokens, _ = SIZES[lesson1.scale(tokenizer)]
    n, seeds = (max(2, n // 8), 2) if quick else (n, seeds)
    trainer16, mixture = lesson1.load_model(path, torch.bfloat16), is_mixture(trainer.config)
    measured = {}            # (situation, kind of replay) -> [(log pi, log mu, flips) of each seed]

    def add(situation: str, rollout, model, old, kinds=("none", "r3")) -> None:
        flipped = flips(own_routes(model, rollout), rollout.routes, rollout) if mixture else None
        for kind in kinds if mixture else ("none",):
            logp = logprobs(model, rollout, routes_for(kind, old, rollout))
            measured.setdefault((situation, kind), []).append(
                (logp[rollout.mask], rollout.logp_sampler[rollout.mask], flipped))

    for repeat in tqdm(range(seeds), desc="the mixture" if mixture else "the dense policy"):
        prompts, rollout, ahead = sample_and_step(
            trainer, engine, tokenizer, n, max_tokens, [seed, repeat])
        add("natural, fp32 trainer", rollout, trainer, trainer)
        add("natural, bf16 trainer", rollout, trainer16, trainer16)
        add("one step stale", rollout, ahead, trainer, kinds=("none", "r2", "r3"))
        engine.sync(trainer, lesson3.parameter_noise(NOISE, seed + repeat)(trainer.state_dict()))
        rollout = engine.sample(prompts, max_tokens, seed=[seed, repeat])
        add(f"parameter noise {NOISE:.0%}", rollout, trainer, trainer)
    rows = []
    for (situation, kind), each in measured.items():
        logp, mu, flipped = zip(*each)
        row = {"policy": "MoE" if mixture else "dense", "situation": situation, "replay": kind,
               **gap_row(list(zip(logp, mu)))}
        if mixture:
            row |= flip_row(torch.cat(logp) - torch.cat(mu), torch.cat(flipped))
        rows.append(row)
    return rows


# ---------------------------------------------------------------- experiment 2: the jump
@torch.no_grad()
def jump(trainer, ahead, rollout, points: int = 41) -> dict:
    """log pi of single tokens on the straight line between two weight settings, live and with the
    picks of u = 0 replayed, in float64 but for the gates. A step leads to the next point."""
    model = copy.deepcopy(trainer).double()
    model.set_experts_implementation("eager")                   # the default one has no float64
    start, end = copy.deepcopy(model.state_dict()), copy.deepcopy(ahead).double().state_dict()

    def at(u: float, rollout, routes: Tensor | None = None) -> Tensor:
        """log pi (B, T) at the weights (1 - u) start + u end."""
        model.load_state_dict({name: torch.lerp(x, end[name], u) for name, x in start.items()})
        return logprobs(model, rollout, routes)

    u, live, fixed, routes = np.linspace(0, 1, points), [], [], []
    for x in tqdm(u, desc="the jump"):
        live.append(at(x, rollout)[rollout.mask])
        routes.append(own_routes(model, rollout))
        fixed.append(at(x, rollout, routes[0])[rollout.mask])
    live, fixed = torch.stack(live), torch.stack(fixed)         # (points, n)
    # only a token's own picks are judged, although a flip in its prefix moves it too
    flipped = torch.stack([(flips(a, b, rollout) > 0).any(1) for a, b in zip(routes, routes[1:])])
    steps, steps_fixed = live.diff(dim=0).abs(), fixed.diff(dim=0).abs()

    # halve the largest step at a flip, again and again: a continuous change goes to 0, a jump stays
    k, token = divmod(int(torch.where(flipped, steps, -1.0).argmax()), live.shape[1])
    row, t = rollout.mask.nonzero()[token].tolist()
    low, high = u[k], u[k + 1]
    at_low, at_high = (at(x, rollout[row:row + 1])[0, t].item() for x in (low, high))
    for _ in range(20):
        middle = (low + high) / 2
        at_middle = at(middle, rollout[row:row + 1])[0, t].item()
        if abs(at_middle - at_low) >= abs(at_high - at_middle):   # keep the half that changes more
            high, at_high = middle, at_middle
        else:
            low, at_low = middle, at_middle
    return {"step at a flip": steps[flipped].mean().item(),
            "elsewhere": steps[~flipped].mean().item(), "replayed": steps_fixed.mean().item(),
            "largest": steps.max().item(), "largest replayed": steps_fixed.max().item(),
            "flips per token": flipped.sum(0).double().mean().item(),
            "jump": abs(at_high - at_low), "within": float(high - low), "u": u.tolist(),
            "log pi": live[:, token].tolist(), "log pi, replayed": fixed[:, token].tolist(),
            "flips at": flipped[:, token].nonzero().flatten().tolist()}


# ---------------------------------------------------------------- main
def verdict(rows: list[dict]) -> str:
    """The mixture's natural gap read aloud. It follows the numbers."""
    live, replayed = (row for row in rows if row["policy"] == "MoE"
                      and row["situation"] == "natural, fp32 trainer")
    says = f"At the same weights {live['picks that flip']:.2%} of the picks flip"
    if not live["picks that flip"]:
        return f"{says}: there is nothing to replay."
    shares = [1 - b / a for a, b in zip(live["k3 by seed"], replayed["k3 by seed"])]
    if min(shares) <= 0:
        return f"{says}. Replay does not lower the mixture's k3 with every seed."
    return (f"{says}. They make {1 - replayed['k3'] / live['k3']:.0%} of the mixture's k3 "
            f"({min(shares):.0%} to {max(shares):.0%} by seed). Replay removes that part.")


def main(argv=None) -> dict:
    args, trainer, tokenizer = lesson1.arguments(__file__, __doc__, argv, architecture=MIXTURE)
    try:
        normalizes(trainer)                            # before vLLM starts
    except ValueError as error:
        lesson1.argparse.ArgumentParser().error(f"--model {args.model}: {error}")
    engine, rows = RoutedSampler(args.path), []        # the first engine of this process
    if lesson1.is_tiny(tokenizer):                     # lesson 1's policy, to compare with
        path = lesson1.policy()
        dense = path, lesson1.load_model(path), lesson1.Sampler(path)
        rows += one_policy(*dense, tokenizer, args.seed, args.quick)
    rows += one_policy(args.path, trainer, engine, tokenizer, args.seed, args.quick)
    n, T = 32 if args.quick else 128, min(64, SIZES[lesson1.scale(tokenizer)][2])
    _, rollout, ahead = sample_and_step(trainer, engine, tokenizer, n, T, [args.seed, 9])
    result = lesson1.save({"model": args.path, "seed": args.seed, "gap": rows,
                           "jump": jump(trainer, ahead, rollout[:n // 4])}, args.json)
    lesson1.table("the gap d = log pi - log mu, live and replayed", result["gap"], "policy",
                  "situation", "replay", "mean |d|", "rms", "max", "k3", "k3 ±", "F(1.1)", "F(2)")
    lesson1.table("where it is", [row for row in result["gap"] if row["policy"] == "MoE"],
                  "situation", "replay", "picks that flip", "by layer", "tokens with a flip",
                  "if layers are independent", "rms d: no flip", "rms d: flip")
    lesson1.table("the jump: mean change of log pi per step between two weight settings",
                  [result["jump"]], "step at a flip", "elsewhere", "replayed", "jump", "within")
    print(f"\n{verdict(result['gap'])}")
    return result


if __name__ == "__main__":
    main()
