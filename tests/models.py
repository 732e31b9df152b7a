"""Any causal language model: a matrix of tiny random checkpoints, made on the spot, each taken through
find_model -> Sampler -> sync -> sample -> logprobs in float32. Run before a release (2 minutes):

    python tests/models.py              all of them
    python tests/models.py llama opt    some of them

Predicted: a gap of at most 1e-5 nats after a sync of moved weights; or one line that says why not, before
vLLM starts. pytest takes a few of them."""
import string
import sys
import tempfile
from importlib import import_module
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))
lesson1 = import_module("01_mismatch")
lesson5 = import_module("05_router_replay")
import numpy as np
import torch
import transformers
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors

V = 320
SIZE = dict(vocab_size=V, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, head_dim=32, max_position_embeddings=512)
EXPERTS = dict(num_experts=8, num_experts_per_tok=2, norm_topk_prob=True)
ARCHITECTURES = {    # name -> the config's model_type, its sizes
    "llama": ("llama", SIZE),
    "llama-tied": ("llama", {**SIZE, "tie_word_embeddings": True}),
    "llama-sharded": ("llama", SIZE),
    "llama-float16": ("llama", SIZE),
    "llama-several-eos": ("llama", SIZE),
    "llama-no-pad": ("llama", SIZE),
    "llama-adds-bos": ("llama", SIZE),
    "llama-adds-eos": ("llama", SIZE),
    "qwen2": ("qwen2", {**SIZE, "tie_word_embeddings": True}),
    "qwen3": ("qwen3", SIZE),
    "mistral-window": ("mistral", {**SIZE, "sliding_window": 16}),
    "gemma2": ("gemma2", {**SIZE, "sliding_window": 64, "query_pre_attn_scalar": 32}),
    "gemma3": ("gemma3_text", {**SIZE, "sliding_window": 64, "query_pre_attn_scalar": 32}),
    "phi": ("phi", {**SIZE, "num_key_value_heads": 2, "intermediate_size": 256}),
    "gpt2": ("gpt2", dict(vocab_size=V, n_embd=64, n_layer=2, n_head=2, n_positions=512)),
    "opt": ("opt", dict(vocab_size=V, hidden_size=64, ffn_dim=128, num_hidden_layers=2, num_attention_heads=2,
                        word_embed_proj_dim=64, max_position_embeddings=512)),
    "gpt-neox": ("gpt_neox", dict(vocab_size=V, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                  num_attention_heads=2, max_position_embeddings=512)),
    "olmoe": ("olmoe", {**SIZE, **EXPERTS, "num_key_value_heads": 2}),
    "qwen3-moe": ("qwen3_moe", {**SIZE, **EXPERTS, "moe_intermediate_size": 32, "mlp_only_layers": [0]}),
}


def make_tokenizer(name: str):
    """Printable characters; with a beginning or an end of its own where the name says so."""
    ids = {c: i for i, c in enumerate([*string.printable, "<unk>", "<bos>", "<eos>", "<eos2>"])}
    characters = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    characters.pre_tokenizer, characters.decoder = pre_tokenizers.Split("", "isolated"), decoders.Fuse()
    if name.endswith("adds-bos"):
        characters.post_processor = processors.TemplateProcessing("<bos> $A", special_tokens=[("<bos>", ids["<bos>"])])
    if name.endswith("adds-eos"):
        characters.post_processor = processors.TemplateProcessing("$A <eos>", special_tokens=[("<eos>", ids["<eos>"])])
    pad = {} if name.endswith("no-pad") else {"pad_token": "<unk>"}
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=characters, eos_token="<eos>", bos_token="<bos>", unk_token="<unk>", **pad)


def make(name: str, folder: Path) -> Path:
    """The checkpoint of that name: random weights, large enough that positions and biases matter."""
    tokenizer, (kind, sizes) = make_tokenizer(name), ARCHITECTURES[name]
    eos = tokenizer.eos_token_id
    ends = {"eos_token_id": [eos, eos + 1] if name.endswith("several-eos") else eos, "bos_token_id": None, "pad_token_id": None}
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(kind, **{**sizes, **ends}))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape))
    model = model.half() if name.endswith("float16") else model
    model.save_pretrained(folder, **({"max_shard_size": "50KB"} if name.endswith("sharded") else {}))
    tokenizer.save_pretrained(folder)
    return folder


def check(name: str, folder: Path) -> str:
    """One model from its files to the log-probs of what vLLM sampled at moved weights."""
    try:
        path = lesson1.find_model(str(make(name, folder)))
        model = lesson1.load_model(path)
    except ValueError as error:
        return f"refused: {error}"
    kind = lesson5.RoutedSampler if lesson5.is_mixture(model.config) else lesson1.Sampler
    sampler = kind(path, "float32")
    try:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.01 * torch.randn(parameter.shape))
        sampler.sync(model)
        tokenizer = transformers.AutoTokenizer.from_pretrained(path)
        _, prompts = lesson1.make_prompts(lesson1.SUM, tokenizer, 6, np.random.default_rng(0))
        prompts = [prompt[k:] for k, prompt in enumerate(prompts)]              # of several lengths
        rollout = sampler.sample(prompts, 24, seed=0, group_size=2, head=4)
        d = (lesson1.logprobs(model, rollout) - rollout.logp_sampler)[rollout.mask].abs()
        return f"gap {d.max().item():.1e}"
    except (ValueError, RuntimeError) as error:
        return f"refused: {str(error).splitlines()[0]}"
    finally:
        sampler.stop()


def main(names: list[str]) -> None:
    for name in names or ARCHITECTURES:
        with tempfile.TemporaryDirectory() as folder:
            print(f"{name:20}{check(name, Path(folder))}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
