"""Lesson 5: why is a mixture of experts worse, and what does replaying the router change?

A dense policy answers a small numerical difference with a small one. In a mixture of experts each layer's router picks
k of E experts for a token, and a pick has no small changes: where two experts are about tied, rounding decides, and the
token goes through other matrices in the engine than in the trainer. Router replay (R3, arXiv 2510.11370) takes the
sampler's picks into the trainer:

    p = softmax(W x)                     router, at the trainer's weights and activations
    I = the k largest of p               live;        I = what the sampler picked    replayed
    g_i = p_i / sum_{j in I} p_j         gates, always from the trainer's p: gradients reach the router
    y = sum_{i in I} g_i expert_i(x)

R3 replays the sampler's picks wherever the trainer scores a response. R2 (MiniRL, arXiv 2512.01374; "routing replay" in
GSPO) replays the trainer's own picks at the sampler's weights while it updates: it leaves the engine's part alone, and
keeps the experts of a response fixed while the weights move away.

Words: a pick is a router's choice of k experts for one input token; a flip is a pick that two computations make
differently, as a set: the order does not count; routes are the picks of all input tokens in all L layers, (B, P + T, L, k) for
P prompt and T response positions. F(tau): share of tokens whose probability ratio, or its inverse, exceeds tau.

Run it:  python 05_router_replay.py            a CPU: a tiny Qwen3-MoE beside lesson 1's dense policy, under 90 s once
                                               both exist
         python 05_router_replay.py --study    training with a stale sampler under no replay, R2, R3: half an hour, resumable
         --model <a Qwen-MoE>                  a CUDA GPU (not run yet)
Expect:  half a percent of the picks flip between a bf16 engine and an fp32 trainer; few tokens, but the tail of the gap:
         F(1.1) shows it, F(2) is 0 at the natural gap; replay removes the tail, and not the rest; numbers in figures/05_router_replay.json, picture in figures/05_router_replay.png.

Exercises (tests/test_05_router_replay.py grades the functions):
 1. Write `gates` (two lines): which of its lines lets the gradient into the router? What if the sampler's gates were
    replayed as well? test_gates.
 2. Write `flips` so that {0, 2} and {2, 0} are the same pick (3 lines); test_flips.
 3. In `jump`, replay the picks of u = 1 instead of those of u = 0 (1 line): where does that curve meet the live one?
 4. In `replay`, remove the hooks after a bare `yield`, without try and finally: which tests notice?
 5. Reach a number: the mixture's k3 without replay, natural, fp32 trainer, below 1e-5 (1 word).
 6. Find the bug: `python tests/exercises.py --bug 05 --seed 1`, then --seed 2, 3 (see the README).
"""
import copy
from contextlib import contextmanager
from importlib import import_module
from pathlib import Path

import numpy as np

lesson1 = import_module("01_mismatch")   # before torch: it hides the broken packages around it
lesson2 = import_module("02_importance_sampling")
lesson3 = import_module("03_decompose")
lesson4 = import_module("04_dlc")
import torch
import transformers
from torch import Tensor
from tqdm import tqdm

MIXTURE = {**lesson1.ARCHITECTURE, "num_hidden_layers": 3, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
           "norm_topk_prob": True}       # 370k parameters; the released Qwen3-MoE normalise their gates too
NOISE = 0.02                             # relative weight noise loaded into the engine: the amplified discrepancy


# ---------------------------------------------------------------- the router
def routers(model) -> list:
    """The routers of a Qwen-MoE, layer by layer. Raises ValueError for a model that has none."""
    found = [layer.mlp.gate for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    if not found:
        raise ValueError("this model has no router to replay: it is dense, or not built like Qwen's mixtures of experts")
    return found


def gates(router_logits: Tensor, picks: Tensor, normalise: bool) -> Tensor:
    """Gate weights (n, k) of the picked experts (n, k) from the router's logits (n, E), in float32 as transformers does it.
    normalise: the model's norm_topk_prob, whether the k weights sum to 1."""
    # p = softmax(W x)
    p = router_logits.float().softmax(-1).gather(-1, picks)
    # g_i = p_i / sum_{j in I} p_j
    return p / p.sum(-1, keepdim=True) if normalise else p


def check_routes(model, routes: Tensor) -> None:
    """Raises ValueError if these routes cannot be this model's: None, other than (B, P + T, L, k) with the model's L and k, other
    than int64 ids of its experts. Padding may hold any of them, twice the same too."""
    found = routers(model)
    if routes is None:
        raise ValueError("no routes were recorded: the engine must be started on a mixture of experts")
    if routes.dim() != 4 or routes.shape[2:] != (len(found), found[0].top_k):
        raise ValueError(f"routes for (layers, experts a token) = {tuple(routes.shape[2:])}, but the model has {(len(found), found[0].top_k)}")
    if routes.dtype != torch.int64 or routes.min() < 0 or routes.max() >= found[0].num_experts:
        raise ValueError(f"routes must be int64 ids of {found[0].num_experts} experts, not {routes.dtype} from {routes.min()} to {routes.max()}")


@contextmanager
def replay(model, routes: Tensor):
    """Within it, the model's routers pick what `routes` (B, P + T, L, k) says for each input token: R3 with the sampler's, R2 with
    the trainer's own at the sampler's weights. Gates come from the model's own logits. A second forward pass within it picks
    the same (with gradient checkpointing `backward` must stand within it too); outside nothing is left behind.
    Raises ValueError for routes that are not this model's, and for a batch of another number of input tokens."""
    check_routes(model, routes)

    def replaced(picks):
        """A hook that gives a router these picks (n, k)."""
        def hook(router, inputs, output):
            if inputs[0].numel() // inputs[0].shape[-1] != len(picks):
                raise ValueError(f"routes for {len(picks)} input tokens, but the batch has {inputs[0].numel() // inputs[0].shape[-1]}")
            logits = output[0]
            return logits, gates(logits, picks, router.norm_topk_prob).to(logits.dtype), picks
        return hook

    hooks = []
    try:
        for layer, router in enumerate(routers(model)):
            hooks.append(router.register_forward_hook(replaced(routes[:, :, layer].flatten(0, 1))))
        yield
    finally:
        for hook in hooks:
            hook.remove()


@torch.no_grad()
def own_routes(model, rollout) -> Tensor:
    """What the model's routers pick on a rollout's tokens, (B, P + T, L, k)."""
    picks, hooks = [], []
    try:
        for router in routers(model):
            hooks.append(router.register_forward_hook(lambda router, inputs, output: picks[-1].append(output[2])))
        for rows in lesson1.micro_batches(rollout, model.config.get_text_config().vocab_size):
            picks.append([])
            lesson1.response_logits(model, rollout[rows])
    finally:
        for hook in hooks:
            hook.remove()
    length = rollout.prompt_ids.shape[1] + rollout.ids.shape[1]
    return torch.cat([torch.stack([layer.view(-1, length, layer.shape[-1]) for layer in part], 2) for part in picks])


def score(model, rollout, routes: Tensor | None = None, head: bool = False, grad: bool = False):
    """Lesson 1's `score`, with `routes` replayed if there are any."""
    if routes is None:
        return lesson1.score(model, rollout, head, grad)
    parts = []
    for rows in lesson1.micro_batches(rollout, model.config.get_text_config().vocab_size):
        with replay(model, routes[rows]):
            parts.append(lesson1.score(model, rollout[rows], head, grad))
    return tuple(map(torch.cat, zip(*parts))) if head else torch.cat(parts)


def routes_for(kind: str, old, rollout) -> Tensor | None:
    """What is replayed under "none", "r2" (the trainer's picks at the sampler's weights, `old`) and "r3" (the sampler's)."""
    return {"none": lambda: None, "r2": lambda: own_routes(old, rollout), "r3": lambda: rollout.routes}[kind]()


# ---------------------------------------------------------------- the measures
def flips(routes: Tensor, others: Tensor, rollout) -> Tensor:
    """(n, L) how many of the k experts two recordings (B, P + T, L, k) do not share, for the n input tokens whose logits
    score a response token."""
    P = rollout.prompt_ids.shape[1]
    a, b = (x[:, P - 1:-1][rollout.mask] for x in (routes, others))        # (n, L, k)
    return a.shape[-1] - (a[..., :, None] == b[..., None, :]).any(-1).sum(-1)


def flip_statistics(changed: Tensor) -> dict:
    """Shares of picks and of tokens with a flip, experts changed a token, share of picks by layer; changed (n, L). Where the layers
    flip independently, the share of tokens is 1 - prod over layers of (1 - share of picks)."""
    by_layer = (changed > 0).double().mean(0)
    return {"picks": by_layer.mean().item(), "tokens": (changed > 0).any(1).double().mean().item(), "tokens_predicted": (1 - (1 - by_layer).prod()).item(),
            "experts": changed.sum(1).double().mean().item(), "by_layer": by_layer.tolist()}


def beyond(d: Tensor, tau: float) -> float:
    """F(tau): share of tokens with max(exp(d), exp(-d)) > tau (R3, arXiv 2510.11370)."""
    return (d.abs() > np.log(tau)).double().mean().item()


def gap_statistics(logp: Tensor, logp_sampler: Tensor) -> dict:
    """Lesson 1's gap of n tokens, with the tail's shares."""
    d = (logp - logp_sampler).double()
    return {**lesson1.gap(logp, logp_sampler), "F(1.1)": beyond(d, 1.1), "F(2)": beyond(d, 2)}


# ---------------------------------------------------------------- experiment 1: the gap, live and replayed
def one_policy(path, trainer, engine, tokenizer, seed: int, quick: bool) -> list[dict]:
    """The gap of one policy, dense or mixture: natural (bf16 engine; fp32 and bf16 trainer), with noise in the engine's weights, and
    one optimizer step after the sync; for a mixture also with replay, and how many picks flipped."""
    task, tiny = lesson1.TASKS["sum"], lesson1.is_tiny(tokenizer)
    n, repeats = (512, 4) if tiny else (64, 2)
    n, repeats = (n // 8, 2) if quick else (n, repeats)
    max_tokens, lr = (task.max_tokens, 1.5e-3) if tiny else (256, 1e-6)
    digits, prompts = lesson1.make_prompts(task, tokenizer, n, np.random.default_rng(seed))
    trainer16 = lesson1.load_model(path, torch.bfloat16)
    kind, arms = "MoE" if engine.mixture else "dense", {}

    def record(situation: str, rollout, model, old) -> None:
        """model: the trainer; old: the trainer at the sampler's weights, for R2."""
        replays = ("none", "r2", "r3") if engine.mixture else ("none",)
        changed = flips(own_routes(model, rollout), rollout.routes, rollout) if engine.mixture else None
        for replayed in replays:
            if replayed == "r2" and model is old:
                continue                                                    # its own picks: nothing changes
            logp = score(model, rollout, routes_for(replayed, old, rollout))
            arms.setdefault((situation, replayed), []).append((logp[rollout.mask], rollout.logp_sampler[rollout.mask], changed))

    for repeat in tqdm(range(repeats), desc=f"{kind}: measuring"):
        engine.sync(trainer)
        rollout = engine.sample(prompts, max_tokens, seed=[seed, repeat])
        record("natural, fp32 trainer", rollout, trainer, trainer)
        record("natural, bf16 trainer", rollout, trainer16, trainer16)
        ahead = copy.deepcopy(trainer)
        lesson1.one_step(ahead, rollout, lesson1.rewards(task, digits, rollout, tokenizer), lr)
        record("one step stale", rollout, ahead, trainer)
        engine.sync(trainer, lesson3.weight_noise(NOISE, seed + repeat)(trainer.state_dict()))
        record(f"weight noise {NOISE:.0%}", engine.sample(prompts, max_tokens, seed=[seed, repeat]), trainer, trainer)
    rows = []
    for (situation, replayed), measured in arms.items():
        each = [gap_statistics(logp, mu) for logp, mu, _ in measured]
        row = {"policy": kind, "situation": situation, "replay": replayed, "tokens": sum(len(logp) for logp, _, _ in measured)}
        for key in ("abs", "rms", "k3", "F(1.1)", "F(2)"):
            row[key], row[f"{key} spread"] = float(np.mean([e[key] for e in each])), float(np.std([e[key] for e in each], ddof=1))
        row["max"] = max(e["max"] for e in each)
        if engine.mixture:
            row["flips"] = flip_statistics(torch.cat([changed for _, _, changed in measured]))
            # the tokens without a flip in any layer: what is left of the gap there?
            quiet = [((logp - mu)[(changed == 0).all(1)], (logp - mu)[(changed > 0).any(1)]) for logp, mu, changed in measured]
            for name, part in zip(("rms where no pick flips", "rms where one does"), zip(*quiet)):
                d = torch.cat(part).double()
                row[name] = d.square().mean().sqrt().item() if len(d) else float("nan")
        rows.append(row)
    return rows


# ---------------------------------------------------------------- experiment 2: the jump
@torch.no_grad()
def path_logp(model, start: dict, end: dict, u: float, rollout, routes: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """log pi (B, T) and the picks at the weights (1 - u) start + u end."""
    model.load_state_dict({name: torch.lerp(value, end[name], u) for name, value in start.items()})
    return score(model, rollout, routes), own_routes(model, rollout)


def jump(trainer, ahead, rollout, points: int = 41) -> dict:
    """log pi of single tokens on the straight line from one weight setting to another, live and with the picks of u = 0 replayed,
    in float64 (but for the gates): is the step between neighbouring points larger where a pick flips? Halving the distance halves a
    continuous step, and leaves a jump as it is."""
    model, held = copy.deepcopy(trainer).double(), None
    model.set_experts_implementation("eager")                              # the default one has no float64
    start, end = copy.deepcopy(model.state_dict()), copy.deepcopy(ahead).double().state_dict()
    u = np.linspace(0, 1, points)
    live, fixed, routes = [], [], []
    for x in tqdm(u, desc="the jump"):
        logp, picks = path_logp(model, start, end, x, rollout)
        held = picks if held is None else held
        live.append(logp[rollout.mask])
        fixed.append(path_logp(model, start, end, x, rollout, held)[0][rollout.mask])
        routes.append(picks)
    live, fixed = torch.stack(live), torch.stack(fixed)                    # (points, n)
    flipped = torch.stack([(flips(a, b, rollout) > 0).any(1) for a, b in zip(routes, routes[1:])])
    steps, steps_fixed = live.diff(dim=0).abs(), fixed.diff(dim=0).abs()
    # a flip anywhere in a prefix moves the tokens after it as well: judge the tokens whose own picks flipped
    k, token = divmod(int(torch.where(flipped, steps, -1.0).argmax()), live.shape[1])
    # bisect the interval of the largest jump down to 2^-20 of it
    low, high, row = u[k], u[k + 1], torch.nonzero(rollout.mask)[token]
    at = lambda x: path_logp(model, start, end, x, rollout[int(row[0]):int(row[0]) + 1])[0]
    logp_low, logp_high = at(low), at(high)
    for _ in range(20):
        middle = (low + high) / 2
        logp_middle = at(middle)
        # keep the half with the larger step
        if (logp_middle - logp_low)[0, row[1]].abs() >= (logp_high - logp_middle)[0, row[1]].abs():
            high, logp_high = middle, logp_middle
        else:
            low, logp_low = middle, logp_middle
    return {"u": u.tolist(), "live": live[:, token].tolist(), "replayed": fixed[:, token].tolist(), "flips_at": np.flatnonzero(flipped[:, token].numpy()).tolist(),
            "step_at_a_flip": steps[flipped].mean().item(), "step_elsewhere": steps[~flipped].mean().item(),
            "step_replayed": steps_fixed.mean().item(), "largest_step": steps.max().item(), "largest_step_replayed": steps_fixed.max().item(),
            "jump": (logp_high - logp_low)[0, row[1]].abs().item(), "jump_width": float(high - low), "flips_per_token": flipped.sum(0).double().mean().item()}


# ---------------------------------------------------------------- experiment 3: what replay does to the gradient
def replayed_gradient(model, rollout, A: Tensor, routes: Tensor | None) -> Tensor:
    """E[A s] as a parameter gradient, a mean over response tokens, with these routes replayed."""
    logp = score(model, rollout, routes, grad=True)
    return lesson3.flat_gradient(model, -lesson2.policy_loss(logp, torch.ones_like(logp), A, rollout.mask, int(rollout.mask.sum())))


def gradients(trainer, engine, tokenizer, seed: int, quick: bool) -> list[dict]:
    """Cosine and size of the replayed policy's gradient against the live one's, on one batch a row: at the sync, and after a few
    steps of training away from it."""
    task, model, group_size, rows = lesson1.TASKS["sum"], copy.deepcopy(trainer), 8, []
    n, max_tokens, lr = (32, task.max_tokens, 1.5e-3) if lesson1.is_tiny(tokenizer) else (8, 256, 1e-6)
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr, weight_decay=0.0)
    run = lesson3.grpo(model, engine, task, tokenizer, optimizer, lesson3.weighted(lesson2.CORRECTIONS["tis"]), 5 if quick else 17, 100, seed, prompts=n,
                       group_size=group_size, max_tokens=max_tokens, decay=False)
    for batch in run:
        if batch.step in (0, 1, 4, 16):
            live = replayed_gradient(model, batch.rollout, batch.advantage, None)
            row = {"age": batch.step, "flips": flip_statistics(flips(own_routes(model, batch.rollout), batch.rollout.routes, batch.rollout))["picks"]}
            for kind in ("r2", "r3"):
                g = replayed_gradient(model, batch.rollout, batch.advantage, routes_for(kind, trainer, batch.rollout))
                row[kind], row[f"{kind} size"] = (g @ live / g.norm() / live.norm()).item(), (g.norm() / live.norm()).item()
            rows.append(row)
    return rows


# ---------------------------------------------------------------- experiment 4: training with a stale sampler (--study)
STUDY = lesson4.Setting("sum", steps=60, period=60, lr=1.5e-3, every=4)


def replayed_score(kind: str):
    """Lesson 3's loop scores through this: live at the sampler's weights, replayed at the trainer's (R2), or both replayed (R3)."""
    def scored(model, rollout, old, grad):
        routes = None if kind == "r2" and model is old else routes_for(kind, old, rollout)      # R2: old's picks are its own
        return score(model, rollout, routes, head=True, grad=grad)
    return scored


def study(start, engine, tokenizer, policy_id: str, done: dict, save) -> dict:
    """MiniRL's weight under no replay, R2 and R3 with syncs every 2, 8 and 32 steps, three paired seeds each, against on-policy runs
    without replay. `done`: records that need no second run; save(records) is called after each."""
    plan = [("on-policy", "none", 1, seed) for seed in range(3)] + [
        ("minirl", kind, period, seed) for period in (2, 8, 32) for kind in ("none", "r2", "r3") for seed in range(3)]
    records, reference = {}, None
    for number, (arm, kind, period, seed) in enumerate(plan):
        key, folder = f"{arm}; {kind}; period {period}; seed {seed}", lesson4.reference_folder(STUDY, policy_id).name
        record = done.get(key)
        if record is None or record["reference"] != folder:
            print(f"run {number + 1} of {len(plan)}: {key}", flush=True)
            reference = reference or lesson4.Reference(start, engine, tokenizer, STUDY, policy_id)
            record = {"reference": folder, "replay": kind, "period": period, **lesson4.run(
                start, engine, tokenizer, STUDY, arm, seed, reference, period=period, loss=lesson3.weighted(lesson2.CORRECTIONS["minirl" if arm == "minirl" else "none"]),
                score=replayed_score(kind))}
        records[key] = record
        save({**done, **records})
    return records


# ---------------------------------------------------------------- table and picture
LITERATURE = """published (R3, arXiv 2510.11370: Qwen3-30B-A3B, 128 experts, top 8, 48 layers, SGLang against Megatron; not measured here): 10 % of the
picks and 94 % of the tokens flip; k3 1.535e-3 live, 7.5e-4 replayed, 6.4e-4 for a dense Qwen3-8B; F(2) about ten times lower with replay"""


def report(result: dict) -> None:
    """The tables, predicted beside measured."""
    print(f"\n{'':47}mean |d| ± seeds        rms       max          k3 ± seeds   F(1.1)    F(2) | live flips: picks   tokens (independent layers)  experts a token   by layer")
    for row in result["gap"]:
        line = (f"{row['policy']:6}{row['situation']:24}replay {row['replay']:7}{row['abs']:11.2e} ± {row['abs spread']:.0e}{row['rms']:11.1e}{row['max']:10.2g}"
                f"{row['k3']:12.1e} ± {row['k3 spread']:.0e}{row['F(1.1)']:9.2%}{row['F(2)']:8.2%}")
        if "flips" in row:
            f = row["flips"]
            line += f" |{f['picks']:13.2%}{f['tokens']:9.2%} ({f['tokens_predicted']:.2%}){f['experts']:27.3f}   " + " ".join(f"{x:.2%}" for x in f["by_layer"])
        print(line)
    print(LITERATURE)
    print("\nwhere is the gap? rms of d, nats               no pick of the token flips | one does")
    for row in result["gap"]:
        if "flips" in row:
            print(f"{row['situation']:24}replay {row['replay']:14}{row['rms where no pick flips']:27.1e} | {row['rms where one does']:.1e}")
    j = result["jump"]
    steps = len(j["u"]) - 1
    print(f"\nthe jump, on the line between two weight settings in {steps} steps, float64: mean change of log pi a step, nats")
    print(f"  where a pick of the token flips {j['step_at_a_flip']:.2e}, where none of its own does {j['step_elsewhere']:.2e}, with the first picks replayed {j['step_replayed']:.2e}")
    print(f"  the largest, cut down to a step of {j['jump_width']:.0e}: predicted 0 if continuous | measured {j['jump']:.2g}")
    print("\ngradient of the replayed policy against the live one, one batch a row: cosine (size)")
    for row in result["gradients"]:
        print(f"  {row['age']:2} steps after the sync, {row['flips']:6.2%} of the picks flip:   R2 {row['r2']:.4f} ({row['r2 size']:.2f})   R3 {row['r3']:.4f} ({row['r3 size']:.2f})")
    if "study" in result:
        every = list(result["study"].values())
        base = lesson4.floor(every)
        print(f"\nstudy: {STUDY.steps} steps under MiniRL's weight; KL(on-policy || run) over its floor ({base:.2g} nats a token) and accuracy at the end, seed by seed")
        for arm, kind, period in dict.fromkeys((r["arm"], r["replay"], r["period"]) for r in every):
            mine = [r for r in every if (r["arm"], r["replay"], r["period"]) == (arm, kind, period)]
            print(f"  synced every {period:2} steps, replay {kind:5}  KL / floor {lesson4.show([lesson4.mean_kl(r) / base for r in mine], 1):20} accuracy {lesson4.show([r['sampled'] for r in mine]):18} "
                  f"seconds {np.mean([r['seconds'] for r in mine]):.0f}")


def draw(result: dict, path) -> None:
    """The picture, from the JSON alone."""
    import matplotlib
    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(16, 4.6))
    find = lambda policy, situation, replayed: next((r for r in result["gap"] if (r["policy"], r["situation"], r["replay"]) == (policy, situation, replayed)), None)
    situations = list(dict.fromkeys(r["situation"] for r in result["gap"]))
    live = [find("MoE", s, "none") for s in situations]
    layers = len(live[0]["flips"]["by_layer"])
    for layer in range(layers):
        left.bar(np.arange(len(situations)) + (layer - (layers - 1) / 2) * 0.8 / layers, [100 * r["flips"]["by_layer"][layer] for r in live], 0.7 / layers,
                 color=str(0.2 + 0.6 * layer / max(1, layers - 1)), edgecolor="k", label=f"layer {layer}" if layers < 9 else None)
    left.set(yscale="log", ylabel="picks that differ, %", title=f"Engine and trainer pick other experts:\n{live[0]['flips']['picks']:.1%} of the picks at the natural gap")
    for axes in (left, middle):
        axes.set_xticks(range(len(situations)), [s.replace(", ", ",\n") for s in situations], fontsize=8)
    left.legend(fontsize=8)
    arms = [("dense", "none", "dense", "0.9"), ("MoE", "none", "MoE, live", "0.15"), ("MoE", "r2", "MoE, R2", "0.45"), ("MoE", "r3", "MoE, R3", "0.7")]
    for i, (policy, replayed, label, shade) in enumerate(arms):
        bars = [(k, find(policy, s, replayed)) for k, s in enumerate(situations)]
        bars = [(k, r) for k, r in bars if r]
        middle.bar([k + (i - 1.5) * 0.2 for k, _ in bars], [r["k3"] for _, r in bars], 0.18, color=shade, edgecolor="k", label=label)
    natural, replayed = find("MoE", situations[0], "none"), find("MoE", situations[0], "r3")
    middle.set(yscale="log", ylabel="k3, nats a token", title=f"Replay divides the natural k3 by {natural['k3'] / replayed['k3']:.1f}\n(R2 = live where there is no lag: not drawn)")
    middle.legend(fontsize=8)
    j = result["jump"]
    right.plot(j["u"], j["live"], "k.-", label="live")
    right.plot(j["u"], j["replayed"], "--", color="0.5", label="picks of u = 0 replayed")
    for k in j["flips_at"]:
        right.axvspan(j["u"][k], j["u"][k + 1], color="0.85")
    right.set(xlabel="u, weights (1 - u) start + u end", ylabel="log pi of one token (nats)", title="A pick has no small changes\n(grey: a pick of this token flips)")
    right.legend(fontsize=8)
    figure.tight_layout()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def main(argv=None) -> dict:
    """Runs the lesson and returns what its JSON holds. argv as on the command line."""
    args, path, trainer = lesson1.lesson_arguments("05_router_replay.py", __doc__, argv,
                                                   study="no replay, R2 and R3 in training, three seeds; resumable", architecture=MIXTURE)
    try:
        routers(trainer)
    except ValueError as error:
        lesson1.Parser(prog="05_router_replay.py").error(f"--model {args.model}: {error}")
    tokenizer = transformers.AutoTokenizer.from_pretrained(path)
    tiny, task = lesson1.is_tiny(tokenizer), lesson1.TASKS["sum"]
    engine = lesson1.Sampler(path)         # before the dense one: vLLM makes the experts' process group with a process' first engine or never
    result = {"settings": {"seed": args.seed, "quick": args.quick, "noise": NOISE}, "gap": []}
    if tiny:                                                        # lesson 1's dense policy, for comparison
        dense = lesson1.policy("sum")
        result["gap"] += one_policy(dense, lesson1.load_model(dense), lesson1.Sampler(dense), tokenizer, args.seed, args.quick)
    result["gap"] += one_policy(path, trainer, engine, tokenizer, args.seed, args.quick)
    engine.sync(trainer)
    digits, prompts = lesson1.make_prompts(task, tokenizer, 32 if args.quick else 128, np.random.default_rng(args.seed))
    rollout, ahead = engine.sample(prompts, task.max_tokens if tiny else 64, seed=[args.seed, 9]), copy.deepcopy(trainer)
    lesson1.one_step(ahead, rollout, lesson1.rewards(task, digits, rollout, tokenizer), 1.5e-3 if tiny else 1e-6)
    result["jump"] = jump(trainer, ahead, rollout[:8 if args.quick else 32])
    result["gradients"] = gradients(trainer, engine, tokenizer, args.seed, args.quick)
    json_path = args.out / "05_router_replay.json"
    before = lesson3.read_json(json_path) or {}
    if args.study:
        save = lambda records: lesson1.save_json({**result, "study": records}, json_path)
        result["study"] = study(trainer, engine, tokenizer, lesson1.file_hashes(Path(path))["model.safetensors"], before.get("study", {}), save)
    elif "study" in before and not args.changed:
        result["study"] = before["study"]                           # a plain run does not lose what the study found
    result = lesson1.save_json(result, json_path)
    report(result)
    rows = {(r["policy"], r["situation"], r["replay"]): r for r in result["gap"]}
    live, replayed = rows["MoE", "natural, fp32 trainer", "none"], rows["MoE", "natural, fp32 trainer", "r3"]
    print(f"\nAt the same weights {live['flips']['picks']:.2%} of the picks flip; they make {1 - replayed['k3'] / live['k3']:.0%} of the mixture's k3, and replay removes them.")
    draw(result, args.out / "05_router_replay.png")
    print(f"picture: {args.out / '05_router_replay.png'}")
    return result


if __name__ == "__main__":
    main()
