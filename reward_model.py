"""Reward model: sample K answers to each prompt, rank them, train a score that is higher for the better of each pair.

    loss(theta) = - mean over pairs (better w, worse l) of  log sigmoid(r_theta(x, y_w) - r_theta(x, y_l)),
                  weighted by 1 / C(K, 2), which counts where K differs; answers that tie make no pair

    r_theta(x, y) = head . (the backbone's last hidden state at the last token of prompt x and answer y)

In memory: one model. Its frozen weights sample the answers; the same weights with a LoRA adapter and a head of one row
score them. Each answer is encoded once, not once per pair it is in: K forward passes instead of K (K - 1).

    python reward_model.py                  # babylm/babyllama-100m-2024; or tiny_llama, if it cannot be had
    python reward_model.py --model tiny_llama --num-generations 9 --batching by-prompt
    python reward_model.py --data my_pairs.jsonl    # {"prompt": ..., "chosen": ..., "rejected": ...}, one a line: K = 2

Stiennon et al. (arXiv 2009.01325), InstructGPT (2203.02155); Bradley and Terry (1952) for K = 2.
"""

import argparse
import contextlib
import functools
import inspect
import json
import math
import os
import re
import shutil
import sys
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
from huggingface_hub import errors, snapshot_download
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaForCausalLM, logging

# ---------------------------------------------------------------- the loss


def ranked_pairs(scores):
    """The pairs that a ranking of K answers to one prompt makes: InstructGPT, section 3.5.

    scores: K numbers, a list or a tensor (K,); higher is better. Returns [(better, worse), ...], indices into it:
    K (K - 1) / 2 of them, less the pairs that tie.
    Shown by B5 in test_losses.py: 6 pairs for K = 4, 36 for K = 9.
    """
    return [(i, j) for i, a in enumerate(scores) for j, b in enumerate(scores) if a > b]


def last_token(mask):
    """True at the last 1 of each row, and nowhere else: (B, T) -> (B, T)."""
    mask = mask.bool()
    return mask & (mask.flip(1).cumsum(dim=1).flip(1) == 1)


def last_token_scores(token_scores, attention_mask):
    """The score at each row's last real token, which alone has seen the whole answer: (B, L), (B, L) -> (B,).

    It is found by its position in the mask, not by token id or count, so padding may stand on either side, and pad may
    equal EOS. A row without a real token gets 0.
    Shown by B4 and B6 in test_losses.py.
    """
    return torch.where(last_token(attention_mask), token_scores, 0.0).sum(dim=1)


def reward_loss(chosen_scores, rejected_scores, margin=None, weights=None):
    """sum of w * -log sigmoid(chosen - rejected - margin) / sum of w: InstructGPT, eq. 1. Returns (loss, metrics).

    chosen_scores, rejected_scores: (P,), the scores of the better and of the worse answer of each pair. Only their
    difference counts: adding a constant to all scores changes nothing.
    margin: (P,) or a number that the difference should exceed (Llama 2, eq. 2). weights: (P,); None = 1 each. With
    1 / C(K, 2) prompts without ties count the same, however many answers they have; 0 leaves a pair out.
    metrics: accuracy (share of pairs scored in the right order) and margin (mean difference), weighted like the loss.
    Shown by B5 in test_losses.py: a difference of 0 costs ln 2 = 0.693147, 1 costs 0.313262, -1 costs 1.313262.
    """
    weights = torch.ones_like(chosen_scores) if weights is None else weights.to(chosen_scores)
    counted = weights > 0
    gap = torch.where(counted, chosen_scores - rejected_scores, 0.0)  # (P,)
    exceeds = gap if margin is None else torch.where(counted, gap - margin, 0.0)
    total = weights.sum()
    share = weights / torch.where(total > 0, total, 1.0)  # no pairs: 0, not 0 / 0
    correct, gap = (gap > 0).to(gap), gap.detach()
    loss = -(share * F.logsigmoid(exceeds)).sum()  # in one: log(sigmoid(-200)) would be -inf
    return loss, {"accuracy": (share * correct).sum(), "margin": (share * gap).sum()}


# ---------------------------------------------------------------- the task: cheerful stories

OPENINGS = ["Once upon a time there was a {} who", "One day a {} went to the park and", "Every morning the {}"]
OPENINGS += ["The {} looked out of the window and", "In the forest there lived a {} that", "When the {} came home, it"]
HEROES = "little cat, old bear, young girl, small bird, brave mouse, tired farmer, white duck, quiet boy".split(", ")
PROMPTS = [opening.format(hero) for opening in OPENINGS for hero in HEROES]
HELD_OUT_PROMPTS = ["The quick brown fox jumped over the", "Once upon a time there was an old woman who"]
HELD_OUT_PROMPTS += ["The young king sat down by the river and", "It was a dark night and the little train"]
HELD_OUT_PROMPTS += [opening.format(hero) for opening in OPENINGS for hero in ("little dog", "grey rabbit")]

# Words joined by / are one family: "happy" and "happily" count once.
CHEERFUL = """happy/happily/happiness/happier/happiest glad/gladly joy/joyful/joyfully cheerful/cheer/cheered/cheerfully
smile/smiles/smiled/smiling laugh/laughs/laughed/laughing/laughter love/loves/loved/loving/lovely fun/funny
play/plays/played/playing/playful friend/friends/friendly/friendship kind/kindly/kindness nice/nicely bright/brightly
sunny/sunshine warm/warmly/warmth beautiful/beautifully wonderful/wonderfully great good/best sing/sings/sang/singing
dance/dances/danced/dancing hug/hugs/hugged/hugging gift/gifts/present/presents proud/proudly excited/exciting/excitedly
delight/delighted/delightful safe/safely sweet/sweetly giggle/giggled/giggling grateful/thankful magic/magical"""
GLOOMY = """sad/sadly/sadness/sadder cry/cries/cried/crying tear/tears scared/scary afraid/fear/fearful/frightened
lost/lose/loses/losing dark/darkness cold alone/lonely/loneliness angry/angrily/anger hurt/hurts/hurting/pain/painful
bad/badly/worse/worst sick/ill dead/die/dies/died/death hate/hates/hated sorry worry/worries/worried tired hungry
broken/break/breaks/broke terrible/horrible/awful mean/cruel danger/dangerous poor gloomy/grumpy ugly wrong"""
CHEERFUL, GLOOMY = ({w: family for family in ws.split() for w in family.split("/")} for ws in (CHEERFUL, GLOOMY))


def happiness(text):
    """(cheerful families in the text - gloomy ones) / 3, kept within [-1, 1]: the rule that judges a completion.

    Families are counted once, so "happy happy happy" is worth no more than "happy"; three are enough, so a list of
    cheerful words is worth no more than a sentence with three of them.
    """
    words = re.findall(r"[a-z]+", text.lower())
    cheerful, gloomy = (len({family[word] for word in words if word in family}) for family in (CHEERFUL, GLOOMY))
    return max(-1.0, min(1.0, (cheerful - gloomy) / 3))


# ---------------------------------------------------------------- model and sampling

# transformers 5 renamed the keyword past_key_values.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


def load(args):
    """The (model, tokenizer) that args.model names: a folder, or a name on the hub or in its cache.

    No name means babyllama-100m-2024 or, if neither hub nor cache has it, tiny_llama, and a line that says so.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)  # peft uses names that transformers has renamed
    logging.set_verbosity_error()
    name = "babylm/babyllama-100m-2024" if args.model is None else args.model
    embedded = Path(__file__).resolve().parent / "tiny_llama"
    folder = embedded if name == "tiny_llama" else Path(name)
    try:
        if not folder.exists():
            files = ["*.json", "*.safetensors", "*.txt", "*.model"]  # no pickles
            download = functools.partial(snapshot_download, name, allow_patterns=files)
            with contextlib.suppress(Exception):  # the cache first, which needs no network
                folder = Path(download(local_files_only=True))
            try:  # the hub, which is asked once; from_pretrained would retry for a minute
                folder = folder if any(folder.glob("*.safetensors")) else Path(download())
            except errors.LocalEntryNotFoundError:  # no network, and not all of it in the cache
                if args.model is not None:
                    raise
                print(f"The hub cannot be reached and {name} is not in the cache: using the embedded tiny_llama.")
                name, folder = "tiny_llama", embedded
        if not (folder / "config.json").is_file():
            raise ValueError("the folder has no config.json")
        logging.disable_progress_bar()
        options = {"dtype": args.dtype, "use_safetensors": True, "output_loading_info": True}
        model, info = AutoModelForCausalLM.from_pretrained(folder, **options)
        if info["missing_keys"]:
            raise ValueError(f"its file lacks {min(info['missing_keys'])}, which would be random")
        tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
        tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
        known = range(model.get_input_embeddings().weight.shape[0])
        if not {tokenizer.eos_token_id, tokenizer.pad_token_id} <= set(known):
            raise ValueError("its tokenizer has no EOS token, or an EOS or pad token that the model does not know")
    except Exception as error:
        stop(f"the model {name!r} cannot be loaded: {' '.join((str(error) or repr(error)).split())[:300]}")
    layers = {path.split(".")[-2] for path, p in model.named_parameters() if path.endswith("weight") and p.dim() == 2}
    if unknown := sorted(set(args.lora_targets) - layers):
        stop(f"--lora-targets {unknown[0]}: the model has no such layer; it has {', '.join(sorted(layers))}")
    args.model = name
    model.name_or_path = str(embedded) if name == "tiny_llama" else name  # which the adapter is saved with
    return model.to(args.device).eval(), tokenizer  # eval: no dropout, or policy, reference and sampler would differ


def token_scores(model, head, input_ids, attention_mask):
    """A head on the last hidden states: one score at each token, (B, L), (B, L) -> (B, L), float32.

    model: the peft model, whose active adapter is used; no logits are computed. Columns that are padding in every row
    are left out and get 0.
    """
    used = attention_mask.any(dim=0)  # (L,)
    ids, mask = input_ids[:, used], attention_mask[:, used]
    position_ids = (mask.cumsum(dim=1) - 1).clamp(min=0)
    backbone = model.get_base_model().base_model  # without the language model's head; the adapters are inside it
    hidden = backbone(input_ids=ids, attention_mask=mask, position_ids=position_ids, use_cache=False).last_hidden_state
    scores = torch.zeros(attention_mask.shape, device=input_ids.device)
    scores[:, used] = head(hidden.float()).squeeze(-1)
    return scores


def answer_scores(model, rows, pad_token_id):
    """The score of each row of tokens, prompt and answer: a list of B tensors -> (B,)."""
    ids = pad_sequence(rows, batch_first=True, padding_value=pad_token_id)  # (B, L)
    attention_mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return last_token_scores(token_scores(model, model.get_base_model().score, ids, attention_mask), attention_mask)


def completion_mask(completion_ids, eos_token_id):
    """1 up to and including each row's first EOS, 0 after it: (B, T) -> (B, T). Right also where pad == EOS.

    A row of tokens a b E P P gives 1 1 1 0 0 (E: EOS, P: padding). Shown by A5 in test_losses.py.
    """
    is_eos = (completion_ids == eos_token_id).long()
    return (is_eos.cumsum(dim=1) - is_eos == 0).long()


@torch.no_grad()
def sample(model, prompt_ids, prompt_mask, max_completion_length, *, temperature=1.0, eos_token_id, pad_token_id):
    """Sample a completion for each left-padded prompt: (B, P), (B, P) -> its ids and their log-probs, (B, T) each.

    The ids are padded after the EOS. Plain sampling from the softmax: with top-k or top-p the tokens would come from
    another distribution than the one that is trained. The log-probs are those that the tokens were drawn with; a
    pass over the whole text gives the same but for rounding (which bfloat16 makes visible), and with a gradient.
    """
    keywords = {CACHE: DynamicCache(config=model.config), "use_cache": True, "logits_to_keep": torch.tensor([-1])}
    ids, mask, position = prompt_ids, prompt_mask, (prompt_mask.cumsum(dim=1) - 1).clamp(min=0)
    completion, drawn = [], []
    done = torch.zeros_like(prompt_ids[:, :1], dtype=torch.bool)  # (B, 1)
    while len(completion) < max_completion_length and not done.all():
        logits = model(input_ids=ids, attention_mask=mask, position_ids=position, **keywords).logits[:, -1]  # (B, V)
        # Inverse-CDF sampling: the distribution of torch.multinomial in a fraction of its time.
        log_probs = (logits.float() / temperature).log_softmax(dim=-1)
        cumulative = log_probs.exp().cumsum(dim=-1)
        u = torch.rand_like(cumulative[:, :1]) * cumulative[:, -1:]
        ids = torch.searchsorted(cumulative, u, right=True).clamp(max=logits.shape[1] - 1)  # the action: (B, 1)
        ids = ids.masked_fill(done, pad_token_id)
        done = done | (ids == eos_token_id)
        completion.append(ids)
        drawn.append(log_probs.gather(1, ids))
        mask, position = torch.cat([mask, torch.ones_like(ids)], dim=1), position[:, -1:] + 1
    return torch.cat(completion, dim=1), torch.cat(drawn, dim=1)


def complete(model, tokenizer, prompts, args):
    """Sample one completion per prompt: ids (N, L), attention_mask (N, L), mask (N, T), N texts, log-probs (N, T)."""
    prompt = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt").to(args.device)
    options = {"eos_token_id": tokenizer.eos_token_id, "pad_token_id": tokenizer.pad_token_id}
    options["temperature"] = args.temperature
    ids, log_probs = sample(model, prompt.input_ids, prompt.attention_mask, args.max_completion_length, **options)
    mask = completion_mask(ids, tokenizer.eos_token_id)
    texts = [tokenizer.decode(row[:n], skip_special_tokens=True) for row, n in zip(ids, mask.sum(dim=1), strict=True)]
    ids, attention_mask = torch.cat([prompt.input_ids, ids], 1), torch.cat([prompt.attention_mask, mask], 1)
    return ids, attention_mask, mask, texts, log_probs


def ranked_answers(model, tokenizer, prompts, num_generations, args):
    """Sample num_generations answers to each prompt from the model without its adapter, and let the rater rank them.

    Returns one group per prompt: {"prompt", "answers": K texts, "rows": K tensors of tokens, prompt included,
    "happiness": K numbers, "pairs": [(better, worse), ...], "weight": of each pair}.
    """
    K, size, groups = num_generations, 256 // num_generations, []
    for start in tqdm(range(0, len(prompts), size), desc="ranking answers", unit="batch", leave=False):
        batch = [prompt for prompt in prompts[start : start + size] for _ in range(K)]
        with model.disable_adapter():
            ids, attention_mask, _, texts, _ = complete(model.get_base_model(), tokenizer, batch, args)
        rows = [row[mask.bool()] for row, mask in zip(ids, attention_mask, strict=True)]
        for first in range(0, len(batch), K):
            own = slice(first, first + K)
            rated = [happiness(text) for text in texts[own]]
            group = {"prompt": batch[first], "answers": texts[own], "rows": rows[own], "happiness": rated}
            groups.append(group | {"pairs": ranked_pairs(rated), "weight": 1 / math.comb(K, 2)})
    return groups


@torch.no_grad()
def evaluate_scores(model, tokenizer, eights, held_out, args):
    """What the scores are worth: estimates, and the answers with the highest and with the lowest score.

    held_out: groups whose pairs are compared, one number a group (with --data: a line). eights: groups of 8 answers to
    HELD_OUT_PROMPTS, judged by happiness whatever the data. best_of_8 is the happiness of the answer with the highest
    score of its 8; happiness is that of any answer, best_of_8_by_rater that of the happiest.
    """
    columns = {"accuracy": [], "chosen_score": [], "rejected_score": []}
    for group in {id(group): group for group in held_out + eights}.values():  # without --data the two overlap
        group["scores"] = answer_scores(model, group["rows"], tokenizer.pad_token_id)  # (K,)
    for group in held_out:
        scores, (better, worse, _) = group["scores"], pair_rows([group], args.device)
        columns["accuracy"].append((scores[better] > scores[worse]).float().mean())
        columns["chosen_score"].append(scores[better].mean())
        columns["rejected_score"].append(scores[worse].mean())
    scores = [group["scores"].tolist() for group in eights]
    if not all(math.isfinite(x) for row in scores for x in row):
        raise FloatingPointError("the scores of the held-out answers are not finite")
    columns["happiness"] = [h for group in eights for h in group["happiness"]]
    columns["best_of_8"] = [g["happiness"][s.index(max(s))] for s, g in zip(scores, eights, strict=True)]
    columns["best_of_8_by_rater"] = [max(group["happiness"]) for group in eights]
    texts = [group["prompt"] + answer for group in eights for answer in group["answers"]]
    ordered = sorted(zip((x for s in scores for x in s), texts, strict=True))
    shown = [("highest score", "{:.2f} {}".format(*ordered[-1])), ("lowest score", "{:.2f} {}".format(*ordered[0]))]
    return {name: estimate(values) for name, values in columns.items()}, shown


# ---------------------------------------------------------------- training


def train(model, tokenizer, groups, args):
    """InstructGPT's reward model, on groups of ranked answers. Yields the metrics of a step when the step is done."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, args.learning_rate, weight_decay=0)
    queue, samples = [], 0
    for step in range(1, args.steps + 1):
        # 1. The ranked answers to a batch of prompts. Every group is used once before any is used again.
        while len(queue) < args.prompts_per_step:
            queue += [groups[i] for i in torch.randperm(len(groups))]
        batch, queue = queue[: args.prompts_per_step], queue[args.prompts_per_step :]
        samples += sum(len(group["rows"]) for group in batch)

        # 2. Update: one optimizer step on the pairs of all prompts, or one per prompt.
        scores = []
        for part in [batch] if args.batching == "mixed" else [[group] for group in batch]:
            scores.append(backward(model, tokenizer, part, args))
            grad_norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
            if not (scores[-1].isfinite().all() and grad_norm.isfinite()):
                raise FloatingPointError(f"step {step}: a score or the gradient is not finite (its norm: {grad_norm})")
            optimizer.step()
            optimizer.zero_grad()

        # 3. Report, from the scores before each update (grad_norm is the last update's).
        scores, (better, worse, weights) = torch.cat(scores), pair_rows(batch, args.device)
        loss, metrics = reward_loss(scores[better], scores[worse], weights=weights)
        metrics |= {"loss": loss, "grad_norm": grad_norm, "mean_score": scores.mean(), "pairs": len(better)}
        yield {"step": step, "samples": samples, **metrics}


def backward(model, tokenizer, groups, args):
    """Add the gradient of the loss over all pairs of these groups. Returns the scores of their answers, (N,).

    A micro-batch is made of whole groups (one at least), so that each answer is encoded once and each pair has both its
    scores in it. Its mean loss counts by its share of the weights, so that the sum is the gradient of the whole.
    """
    total = pair_rows(groups, args.device)[2].sum()
    size = max(1, args.micro_batch_size // max(len(group["rows"]) for group in groups))
    scores = []
    for i in range(0, len(groups), size):
        piece = groups[i : i + size]
        scores.append(answer_scores(model, [row for group in piece for row in group["rows"]], tokenizer.pad_token_id))
        better, worse, weights = pair_rows(piece, args.device)
        loss, _ = reward_loss(scores[-1][better], scores[-1][worse], weights=weights)
        (loss * weights.sum() / total).backward()
    return torch.cat(scores).detach()


def pair_rows(groups, device):
    """The pairs of all groups: better (P,) and worse (P,), indices into all answers end to end, and weights (P,)."""
    pairs, first = [], 0
    for group in groups:
        pairs += [(first + better, first + worse, group["weight"]) for better, worse in group["pairs"]]
        first += len(group["rows"])
    better, worse, weights = zip(*pairs, strict=True) if pairs else ((), (), ())
    index = {"dtype": torch.long, "device": device}
    return torch.tensor(better, **index), torch.tensor(worse, **index), torch.tensor(weights, device=device)


# ---------------------------------------------------------------- command line and files


def parse_args(argv):
    """The options of this script, checked."""
    kind = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], **kind)
    parser.error, add = stop, parser.add_argument
    add("--model", help="name on the hub or folder of a causal language model; tiny_llama is the embedded one")
    add("--lora-targets", nargs="+", default=["q_proj", "v_proj"], help="names of the layers that get an adapter")
    add("--out", type=Path, default=Path("runs") / Path(__file__).stem, help="folder for the results, replaced")
    add("--steps", type=int, default=100, help="training steps")
    add("--seed", type=int, default=0, help="same seed, same CPU: same numbers")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1, ...")
    add("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of the frozen weights")
    add("--learning-rate", type=float, default=3e-3, help="of AdamW, constant")
    add("--max-completion-length", type=int, default=32, help="tokens a completion may have")
    add("--micro-batch-size", type=int, default=8, help="sequences in a training pass")
    add("--temperature", type=float, default=1.0, help="of sampling and of every log-prob")
    source = parser.add_mutually_exclusive_group().add_argument
    source("--prompts", type=Path, help="file of prompts to use instead of the built-in ones, one per line")
    source("--data", type=Path, help="JSONL file of pairs to train on instead; some of its prompts are held out")
    add("--rankings", type=int, default=640, help="rankings to make; the prompts are repeated until there are enough")
    add("--prompts-per-step", type=int, default=16, help="rankings in a batch; with --data pairs")
    add("--num-generations", type=int, default=4, choices=range(2, 10), help="answers to each prompt: K")
    add("--batching", choices=["mixed", "by-prompt"], default="mixed", help="one step on the batch, or one a ranking")
    return check_args(parser.parse_args(argv))


def main(argv=None):
    """Train, from the command line or from Python: main(["--steps", "5"]). Returns the summary."""
    start, args = time.perf_counter(), parse_args(argv)
    pairs = read_pairs(args.data) if args.data else []
    model, tokenizer = load(args)
    prompts = read_prompts(args, model, tokenizer)
    # With SEQ_CLS peft trains and saves the layer named score, the head. It and LoRA are float32, whatever --dtype.
    model.score = torch.nn.Linear(model.config.hidden_size, 1, bias=False, device=args.device)
    config = LoraConfig(r=8, lora_alpha=32, lora_dropout=0.0, target_modules=args.lora_targets, task_type="SEQ_CLS")
    model = get_peft_model(model, config).eval()

    with torch.random.fork_rng():
        torch.manual_seed(0)  # the same for every --seed
        eights = ranked_answers(model, tokenizer, HELD_OUT_PROMPTS * 2, 8, args)  # to choose the best of
    if args.data:
        context = getattr(model.config, "max_position_embeddings", math.inf)
        differ = [p for p in pairs if p["chosen"].strip() and p["rejected"].strip() and p["chosen"] != p["rejected"]]
        groups, held_out = (group_pairs(part, tokenizer, context, args) for part in split_pairs(differ))
        left_out = f"{len(pairs) - len(differ)} with identical or blank answers"
        left_out += f" and {len(differ) - len(groups) - len(held_out)} too long for the context"
        print(f"{len(groups)} pairs to train on, {len(held_out)} held out; {left_out} are left out")
    else:
        begun = time.perf_counter()
        prompts = [prompts[i % len(prompts)] for i in range(args.rankings)]
        groups = ranked_answers(model, tokenizer, prompts, args.num_generations, args)
        groups, held_out = ([group for group in part if group["pairs"]] for part in (groups, eights))
        seconds, ties = time.perf_counter() - begun, args.rankings - len(groups)
        print(f"{len(groups)} rankings made in {seconds:.1f} s; {ties} left out, all answers being equally good")
    if not groups or len(held_out) < 2:
        need = "it takes 1 and 2 at least" + (": take pairs of 4 different prompts" if args.data else "")
        stop(f"{len(groups)} rankings are left to train on and {len(held_out)} to judge by; {need}")

    def write(folder):
        model.save_pretrained(folder, save_embedding_layers=False)
        lines = pairs or [text_pair(g, *pair, tokenizer.eos_token_id) for g in groups for pair in g["pairs"]]
        text = "".join(json.dumps(line) + "\n" for line in lines)
        (folder / "pairs.jsonl").write_text(text, encoding="utf-8")

    judge = functools.partial(evaluate_scores, model, tokenizer, eights, held_out, args)
    shown = {"loss": "loss", "accuracy": "accuracy", "margin": "margin"}
    return run(args, model, start, train(model, tokenizer, groups, args), judge, write, shown)


def stop(sentence, status=2):
    """Print one sentence on stderr and exit: 2 if options, files or numbers are at fault, 130 after Ctrl-C."""
    print(f"{Path(__file__).name}: {sentence}", file=sys.stderr)
    raise SystemExit(status)


def check_args(args):
    """Refuse what cannot work, make the --out folder, seed torch; device and dtype become torch's."""
    for name, value in vars(args).items():
        zero = name in ("seed", "beta", "kl_coef", "lam", "label_smoothing", "missing_eos_penalty")
        if type(value) in (int, float) and not (0 < value < 1e18 or zero and value == 0):
            stop(f"--{name.replace('_', '-')} must be {'at least' if zero else 'above'} 0 and below 1e18, not {value}")
    try:
        torch.zeros(1, device=args.device).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        stop(f"--device {args.device} cannot be used here: {str(error).splitlines()[0]}")
    args.device = torch.device(args.device)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        if any(args.out.iterdir()) and not (args.out / "summary.json").is_file():
            stop(f"--out {args.out} is neither empty nor an earlier result: name another folder")
        if not os.access(args.out.resolve().parent, os.W_OK):
            stop(f"--out {args.out} cannot be replaced: the folder that it is in is not writable")
    except OSError as error:
        stop(f"--out {args.out} cannot be written: {error.strerror}")
    for name in ("model", "prompts", "data", "reward_model"):
        path = Path(getattr(args, name, None) or "/").resolve()
        again = name == "data" and path.name == "pairs.jsonl"  # the new result will hold it, too
        if args.out.resolve() in (path, *path.parents) and not again:
            stop(f"--out {args.out} would replace what --{name.replace('_', '-')} reads: name another folder")
    auto = "bfloat16" if args.device.type == "cuda" and torch.cuda.is_bf16_supported(False) else "float32"
    args.dtype = getattr(torch, auto if args.dtype == "auto" else args.dtype)
    torch.manual_seed(args.seed)
    return args


def read_prompts(args, model, tokenizer):
    """The lines of the --prompts file that are not blank, or PROMPTS. Refused if the context has no room for them."""
    prompts = PROMPTS
    if args.prompts:
        try:
            lines = [line.strip() for line in args.prompts.read_text(encoding="utf-8-sig").split("\n")]
        except (OSError, UnicodeDecodeError) as error:
            stop(f"--prompts {args.prompts} cannot be read: {error}")
        prompts = [line for line in lines if line] or stop(f"--prompts {args.prompts} has only blank lines")
    length = max(len(ids) for ids in tokenizer(prompts + HELD_OUT_PROMPTS, add_special_tokens=False).input_ids)
    context = getattr(model.config, "max_position_embeddings", math.inf)
    if length + args.max_completion_length > context:
        longest = f"a prompt of {length} tokens and --max-completion-length {args.max_completion_length}"
        stop(f"{longest} exceed the model's context of {context} tokens")
    return prompts


def read_pairs(path):
    """The pairs of a UTF-8 file, one JSON object a line with the texts "prompt", "chosen" and "rejected"."""
    pairs = []
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")  # not splitlines: U+2028 is text
    except OSError as error:
        stop(f"--data {path} cannot be read: {error.strerror}")
    for number, line in enumerate(lines, 1):
        try:
            if line.strip():
                pairs.append(json.loads(line.decode()))
                # Raises unless all three are texts, and texts that UTF-8 can hold.
                prompt, *_ = (pairs[-1][name].encode() for name in ("prompt", "chosen", "rejected"))
                if not prompt.strip():
                    raise ValueError("the prompt is blank")
        except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            wanted = "a JSON object with the texts 'prompt', 'chosen' and 'rejected'"
            stop(f"--data {path}, line {number}: it must be {wanted}: {type(error).__name__}: {error}")
    return pairs or stop(f"--data {path} holds no pairs")


def encode_pairs(tokenizer, pairs, context):
    """The pairs as token ids, under the same names.

    Prompt and answer are encoded apart, so that the prompt's ids are those that sampling sees. An answer ends in
    exactly one EOS; a truncated one has none. Too long for the context: the prompt loses its left end, the same for
    both answers. If no token of the prompt can stay, the pair is left out.
    """
    names, eos, encoded = ("prompt", "chosen", "rejected"), tokenizer.eos_token_id, []
    for pair in pairs:
        prompt, *answers = tokenizer([pair[name] for name in names], add_special_tokens=False).input_ids
        for name, ids in zip(names[1:], answers, strict=True):
            if eos in ids:  # a text that spells the EOS out ends there
                del ids[ids.index(eos) :]
            if not ids or not pair.get(f"{name}_truncated"):  # an answer has one token at least
                ids.append(eos)
        room = min(len(prompt), context - max(map(len, answers)))
        if room > 0:
            encoded.append(dict(zip(names, (prompt[-room:], *answers), strict=True)))
    return encoded


def group_pairs(pairs, tokenizer, context, args):
    """The pairs that fit the context as groups of two answers, with what training reads of a group."""
    groups = []
    for pair in encode_pairs(tokenizer, pairs, context):
        rows = [torch.tensor(pair["prompt"] + pair[name], device=args.device) for name in ("chosen", "rejected")]
        groups.append({"rows": rows, "pairs": [(0, 1)], "weight": 1.0})
    return groups


def text_pair(group, better, worse, eos_token_id):
    """A line of pairs.jsonl. An answer without an EOS was cut off: its line says so, so that it gets none when read."""
    rows = {"chosen": better, "rejected": worse}
    pair = {"prompt": group["prompt"]} | {name: group["answers"][row] for name, row in rows.items()}
    return pair | {f"{name}_truncated": True for name, row in rows.items() if group["rows"][row][-1] != eos_token_id}


def split_pairs(pairs):
    """(pairs to train on, held-out pairs), no prompt in both.

    Held out are the pairs of HELD_OUT_PROMPTS. If the file has none of these prompts, or no others: those of every
    tenth prompt (of two prompts at least; of none if there are fewer than four).
    """
    prompts = list(dict.fromkeys(pair["prompt"] for pair in pairs))
    held_out = set(prompts) & set(HELD_OUT_PROMPTS)
    if len(held_out) in (0, len(prompts)):
        held_out = set(prompts[:: min(10, (len(prompts) + 1) // 2)] if len(prompts) > 3 else [])
    return [p for p in pairs if p["prompt"] not in held_out], [p for p in pairs if p["prompt"] in held_out]


def estimate(values):
    """{"mean", "standard_error", "n"} of some numbers."""
    values = torch.tensor(list(values), dtype=torch.float64)
    return {"mean": values.mean().item(), "standard_error": values.std().item() / len(values) ** 0.5, "n": len(values)}


def run(args, model, start, records, judge, write, shown):
    """Judge, train behind a progress bar, judge again, save, report. Returns the summary.

    records: yields a step's metrics. judge() -> ({name: estimate}, [(prompt or heading, text), ...]). write(folder)
    saves the model. shown: {label: metric} for the bar and the curves.
    Ctrl-C, or a number that is not finite: the weights are saved as they are, if a step is done; exit status 130 or 2.
    """
    history, summary, stopped = [], {}, None
    trained, count = model.get_nb_trainable_parameters()
    print(f"{args.model}: {count:,} parameters, {trained:,} trained, {args.device}, {str(args.dtype)[6:]}")

    def held_out(when):
        estimates, texts = judge()
        for name, value in estimates.items():
            mean = round(value["mean"], 3) + 0  # not -0.000
            print(f"held-out {name} {when}: {mean:.3f} ± {value['standard_error']:.3f}")
            summary[f"{name}_{when}"] = value
        return texts

    try:
        texts_before = held_out("before")
        bar = tqdm(records, total=args.steps, unit="step")
        for record in bar:
            history.append({k: v if isinstance(v, int) else round(float(v), 6) for k, v in record.items()})
            bar.set_postfix({label: f"{record[name]:.3f}" for label, name in shown.items() if name in record})
        for (prompt, old), (_, new) in list(zip(texts_before, held_out("after"), strict=True))[:2]:
            print(f"{prompt} ...\n  before: {old!r}\n  after:  {new!r}")
    except (KeyboardInterrupt, FloatingPointError) as error:
        stopped = str(error) or "interrupted"
    status = 130 if stopped == "interrupted" else 2
    if not history:
        stop(f"{stopped}; no step was finished, so nothing is saved", status)
    summary |= {"model": args.model, "options": vars(args), "steps": len(history), "stopped": stopped}
    summary |= {"samples": history[-1]["samples"], "seconds": time.perf_counter() - start}
    summary["peak_memory_mb"] = peak_memory_mb(args.device)
    curves = {label: [record[name] for record in history] for label, name in shown.items() if name in history[0]}
    try:
        save(args.out, write, history, summary, curves)
    except KeyboardInterrupt:  # the first Ctrl-C saves, a second one ends at once
        if stopped == "interrupted":
            raise
        save(args.out, write, history, summary, curves)
    for label, values in curves.items():
        few = values[:: math.ceil(len(values) / 60)]
        low, span = min(few), max(few) - min(few) or 1
        bars = "".join("▁▂▃▄▅▆▇█"[int((value - low) / span * 7.99)] for value in few)
        print(f"{label:>{max(map(len, curves))}} {bars} {values[0]:.3f} to {values[-1]:.3f}")
    print(f"saved in {args.out}")
    if stopped:
        stop(f"{stopped}; the weights after step {len(history)} are saved", status)
    return summary


def save(out, write, history, summary, curves):
    """Write everything into a hidden folder beside `out`, then swap the two: `out` never holds half a result."""
    out = out.resolve()  # a link's target, not the link
    new, old = (out.with_name(f".{out.name}.{os.getpid()}.{which}") for which in ("new", "old"))
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir()
    write(new)
    (new / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in history), encoding="utf-8")
    (new / "summary.json").write_text(json.dumps(summary, indent=2, default=str) + "\n", encoding="utf-8")
    with contextlib.suppress(Exception):  # without a matplotlib that works there is no picture
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 2 * len(curves)), layout="constrained")
        for i, (label, values) in enumerate(curves.items(), 1):
            figure.add_subplot(len(curves), 1, i, xlabel="step", ylabel=label).plot(range(1, len(values) + 1), values)
        figure.savefig(new / "curves.png")
    try:
        if out.exists():
            shutil.rmtree(old, ignore_errors=True)  # what a Ctrl-C in here may have left
            out.rename(old)
        new.rename(out)
    except OSError as error:
        stop(f"--out {out} cannot be replaced ({error.strerror}): the result is in {new}")
    shutil.rmtree(old, ignore_errors=True)


def peak_memory_mb(device):
    """The most memory that tensors on the GPU, or else this process, have held; None on Windows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    with contextlib.suppress(ImportError):
        import resource

        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


if __name__ == "__main__":
    sys.stdout.reconfigure(errors="replace")  # a console that lacks a character should not end the run
    try:
        main()
    except KeyboardInterrupt:
        stop("interrupted; nothing more is saved", 130)
