"""Reward model: sample K answers to each prompt, have them ranked, then give the better of each two the higher score.

    loss(theta) = - 1 / C(K, 2)  sum over pairs (better w, worse l) of  log sigmoid(r_theta(x, y_w) - r_theta(x, y_l))

    r_theta(x, y) = head . (the backbone's last hidden state at the last token of prompt x and answer y)

In memory: one model. Its frozen weights sample the answers; the same weights with a LoRA adapter and a head of one row
score them. The K answers are encoded once, not once a pair: K passes instead of K (K - 1).

    python reward_model.py                  # babylm/babyllama-100m-2024; without a network the embedded tiny_llama
    python reward_model.py --model tiny_llama --num-generations 9 --batching by-prompt
    python reward_model.py --data my_pairs.jsonl    # {"prompt": ..., "chosen": ..., "rejected": ...}, one a line

Stiennon et al. (arXiv 2009.01325), InstructGPT (2203.02155); Bradley and Terry (1952) for K = 2.
"""

import argparse
import contextlib
import functools
import importlib.util
import inspect
import json
import math
import re
import shutil
import signal
import sys
import threading
import time
import warnings
from pathlib import Path

import torch
import torch.nn.functional as F
import transformers
from peft import LoraConfig, get_peft_model
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaForCausalLM
from transformers.utils import has_file

# ---------------------------------------------------------------- the loss


def ranked_pairs(scores):
    """The pairs that a ranking of K answers to one prompt makes: InstructGPT, section 3.5.

    scores: K numbers, a list or a tensor (K,); higher is better. Returns [(better, worse), ...], indices into it:
    K (K - 1) / 2 of them, fewer where answers tie, since a tie ranks neither above the other.
    Shown by B5 in test_losses.py: 6 pairs for K = 4, 36 for K = 9.
    """
    return [(i, j) for i, a in enumerate(scores) for j, b in enumerate(scores) if a > b]


def last_token_scores(token_scores, attention_mask):
    """The score at each row's last real token, which alone has seen the whole answer: (B, L), (B, L) -> (B,).

    The mask finds it, not the token ids, and by position, not by count: right for padding on either side or both, and
    where pad == EOS. A row without a real token gets 0.
    Shown by B4 and B6 in test_losses.py.
    """
    return torch.where(last_token(attention_mask), token_scores, 0.0).sum(dim=1)


def last_token(mask):
    """True at the last 1 of each row, and nowhere else: (B, T) -> (B, T)."""
    mask = mask.bool()
    return mask & (mask.flip(1).cumsum(dim=1).flip(1) == 1)


def reward_loss(chosen_scores, rejected_scores, margin=None, weights=None):
    """sum of w * -log sigmoid(chosen - rejected - margin) / sum of w: InstructGPT, eq. 1. Returns (loss, metrics).

    chosen_scores, rejected_scores: (P,), the scores of the better and of the worse answer of each pair. Only their
    difference counts, so what the scores are is open up to a constant.
    margin: (P,) or a number that the difference should exceed (Llama 2, eq. 2). weights: (P,); None = 1 each. With
    1 / C(K, 2) for the pairs of a prompt each prompt counts the same, however many answers it has; 0 leaves a pair out.
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

# A family a word: "happy" and "happily" count once.
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
CHEERFUL, GLOOMY = (
    {word: family for family in words.split() for word in family.split("/")} for words in (CHEERFUL, GLOOMY)
)


def happiness(text):
    """(cheerful families in the text - gloomy ones) / 3, kept within [-1, 1]: the rule that judges a completion.

    Families are counted once, so "happy happy happy" is worth no more than "happy"; three are enough, so a list of
    cheerful words is worth no more than a sentence with three of them.
    """
    words = re.findall(r"[a-z]+", text.lower())
    cheerful = {CHEERFUL[word] for word in words if word in CHEERFUL}
    gloomy = {GLOOMY[word] for word in words if word in GLOOMY}
    return max(-1.0, min(1.0, (len(cheerful) - len(gloomy)) / 3))


# ---------------------------------------------------------------- model and sampling

# transformers 5 renamed the keyword past_key_values.
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


def load(args):
    """The (model, tokenizer) that args.model names: a folder, or a name in the cache or on the hub.

    No name means babyllama-100m-2024 or, if neither cache nor hub gives it, tiny_llama, and a line that says so.
    """
    warnings.filterwarnings("ignore", category=FutureWarning)  # peft's use of what transformers renamed
    transformers.logging.set_verbosity_error()
    transformers.logging.disable_progress_bar()

    def read(name, **where):
        path = Path(__file__).resolve().parent / name if name == "tiny_llama" else name
        tokenizer = AutoTokenizer.from_pretrained(path, padding_side="left", **where)
        return AutoModelForCausalLM.from_pretrained(path, dtype=args.dtype, use_safetensors=True, **where), tokenizer

    name = args.model or "babylm/babyllama-100m-2024"
    try:
        try:
            model, tokenizer = read(name, local_files_only=True)  # a folder or in the cache: the hub is not asked
        except OSError:
            if Path(name).exists() or name == "tiny_llama":
                raise
            if hub_has(name):
                model, tokenizer = read(name)
            elif args.model:
                raise OSError("it is no folder, not in the cache, and the hub has none or cannot be reached") from None
            else:
                print(f"The hub cannot be reached and {name} is not in the cache: using the embedded tiny_llama.")
                model, tokenizer = read(name := "tiny_llama", local_files_only=True)
    except Exception as error:  # whatever the libraries raise over a wrong name or a broken file
        stop(f"the model {name!r} cannot be loaded: {(str(error) or repr(error)).strip().splitlines()[0]}")
    if tokenizer.eos_token_id is None:
        stop(f"the tokenizer of {name!r} has no end-of-text token, so no completion could end")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    layers = {path.rpartition(".")[2] for path, m in model.named_modules() if getattr(m, "weight", None) is not None}
    for target in set(args.lora_targets) - layers:
        stop(f"--lora-targets {target}: no layer of the model has this name, but {', '.join(sorted(layers))}")
    args.model = name
    return model.to(args.device).eval(), tokenizer  # eval, always: with dropout the first ratio would not be 1


def hub_has(name):
    """Whether the hub has the model; False if it does not answer in 8 s. (from_pretrained would retry for a minute.)"""
    answer = []

    def ask():
        with contextlib.suppress(Exception):
            answer.append(has_file(name, ".gitattributes"))  # every model there has it, no cache does

    thread = threading.Thread(target=ask, daemon=True)
    thread.start()
    thread.join(timeout=8)
    return answer == [True]


def token_scores(model, head, input_ids, attention_mask):
    """A head on the last hidden states: one score at each token, (B, L), (B, L) -> (B, L), float32.

    model: the peft model, whose active adapter is used; no logits are computed.
    """
    backbone = model.get_base_model().base_model
    position_ids = (attention_mask.cumsum(dim=1) - 1).clamp(min=0)
    inputs = {"input_ids": input_ids, "attention_mask": attention_mask, "position_ids": position_ids}
    return head(backbone(**inputs, use_cache=False).last_hidden_state.float()).squeeze(-1)


def answer_scores(model, rows, pad_token_id):
    """The score of each row of tokens, prompt and answer: a list of B tensors -> (B,)."""
    ids = pad_sequence(rows, batch_first=True, padding_value=pad_token_id)  # (B, L)
    attention_mask = pad_sequence([torch.ones_like(row) for row in rows], batch_first=True)
    return last_token_scores(token_scores(model, model.get_base_model().score, ids, attention_mask), attention_mask)


def completion_mask(completion_ids, eos_token_id):
    """1 up to each row's first EOS, that one included, 0 behind it: (B, T) -> (B, T). Right also where pad == EOS."""
    is_eos = (completion_ids == eos_token_id).long()
    return (is_eos.cumsum(dim=1) - is_eos == 0).long()


@torch.no_grad()
def sample(model, prompt_ids, prompt_mask, max_completion_length, *, temperature=1.0, eos_token_id, pad_token_id):
    """Sample a completion to each left-padded prompt: (B, P), (B, P) -> (B, T), padded behind the EOS.

    Plain sampling from the softmax: with top-k or top-p the tokens would come from another distribution than the one
    whose log-probs are trained.
    """
    keywords = {CACHE: DynamicCache(config=model.config), "use_cache": True, "logits_to_keep": 1}
    ids, mask, position = prompt_ids, prompt_mask, (prompt_mask.cumsum(dim=1) - 1).clamp(min=0)
    completion, done = [], torch.zeros_like(prompt_ids[:, :1], dtype=torch.bool)  # done: (B, 1)
    while len(completion) < max_completion_length and not done.all():
        logits = model(input_ids=ids, attention_mask=mask, position_ids=position, **keywords).logits[:, -1]  # (B, V)
        # Where a uniform number falls in the cumulative sum: torch.multinomial's draw in a fraction of its time.
        cumulative = (logits.float() / temperature).softmax(dim=-1).cumsum(dim=-1)
        u = torch.rand_like(cumulative[:, :1]) * cumulative[:, -1:]
        ids = torch.searchsorted(cumulative, u, right=True).clamp(max=logits.shape[1] - 1)  # the action: (B, 1)
        ids = ids.masked_fill(done, pad_token_id)
        done = done | (ids == eos_token_id)
        completion.append(ids)
        mask, position = torch.cat([mask, torch.ones_like(ids)], dim=1), position[:, -1:] + 1
    return torch.cat(completion, dim=1)


def complete(model, tokenizer, prompts, args):
    """Sample one completion a prompt. Returns ids (N, L), attention_mask (N, L), mask (N, T) and the N texts."""
    prompt = tokenizer(prompts, add_special_tokens=False, padding=True, return_tensors="pt").to(args.device)
    options = {"temperature": args.temperature, "eos_token_id": tokenizer.eos_token_id}
    options["pad_token_id"] = tokenizer.pad_token_id
    ids = sample(model, prompt.input_ids, prompt.attention_mask, args.max_completion_length, **options)
    mask = completion_mask(ids, tokenizer.eos_token_id)
    texts = [tokenizer.decode(row[:n], skip_special_tokens=True) for row, n in zip(ids, mask.sum(dim=1), strict=True)]
    return torch.cat([prompt.input_ids, ids], 1), torch.cat([prompt.attention_mask, mask], 1), mask, texts


def ranked_answers(model, tokenizer, prompts, num_generations, args):
    """Sample num_generations answers to each prompt from the model without its adapter, and let the rater rank them.

    Returns a group a prompt: {"prompt", "answers": K texts, "rows": K tensors of tokens, prompt included, "happiness":
    K numbers, "pairs": [(better, worse), ...]}.
    """
    K, groups = num_generations, []
    with model.disable_adapter():
        batch = [prompt for prompt in prompts for _ in range(K)]
        ids, attention_mask, _, texts = complete(model.get_base_model(), tokenizer, batch, args)
    rows = [row[mask.bool()] for row, mask in zip(ids, attention_mask, strict=True)]
    for i, prompt in enumerate(prompts):
        own = slice(i * K, (i + 1) * K)
        rated = [happiness(text) for text in texts[own]]
        groups.append({"prompt": prompt, "answers": texts[own], "rows": rows[own], "happiness": rated})
        groups[-1]["pairs"] = ranked_pairs(rated)
    return groups


@torch.no_grad()
def evaluate_scores(model, tokenizer, sets, held_out, args):
    """What the scores are worth: estimates, and the best and the worst answer of all sets by score.

    held_out: groups whose pairs are compared; each group is one number, since pairs of one prompt are no independent
    draws. sets: groups of 8 answers to the held-out prompts. best_of_8 is the happiness of the answer with the highest
    score of its 8; happiness is that of any answer, best_of_8_by_rater that of the happiest.
    """
    columns = {"accuracy": [], "chosen_score": [], "rejected_score": []}
    for group in held_out:
        if group["pairs"]:
            scores = answer_scores(model, group["rows"], tokenizer.pad_token_id)  # (K,)
            better, worse, _ = pair_rows([group], args.device)
            columns["accuracy"].append((scores[better] > scores[worse]).float().mean())
            columns["chosen_score"].append(scores[better].mean())
            columns["rejected_score"].append(scores[worse].mean())
    if len(columns["accuracy"]) < 2:
        raise ArithmeticError("all answers to the held-out prompts tied, so there are no pairs to judge the scores by")
    scores = [answer_scores(model, group["rows"], tokenizer.pad_token_id).tolist() for group in sets]
    columns["happiness"] = [h for group in sets for h in group["happiness"]]
    columns["best_of_8"] = [max(zip(s, g["happiness"], strict=True))[1] for s, g in zip(scores, sets, strict=True)]
    columns["best_of_8_by_rater"] = [max(group["happiness"]) for group in sets]
    texts = [group["prompt"] + answer for group in sets for answer in group["answers"]]
    ordered = sorted(zip((x for s in scores for x in s), texts, strict=True))
    shown = [("highest score", "{:.2f} {}".format(*ordered[-1])), ("lowest score", "{:.2f} {}".format(*ordered[0]))]
    return {name: estimate(values) for name, values in columns.items()}, shown


# ---------------------------------------------------------------- training


def train(model, tokenizer, material, made, args):
    """InstructGPT's reward model. Yields the metrics of a step when the step is done.

    material: prompts, or with --data the groups of its pairs. made: list to which the groups sampled here are added.
    """
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, args.learning_rate, weight_decay=0)
    queue, samples, pairs = [], 0, 0
    for step in range(1, args.steps + 1):
        while len(queue) < args.prompts_per_step:
            queue += [material[i] for i in torch.randperm(len(material))]
        groups, queue = queue[: args.prompts_per_step], queue[args.prompts_per_step :]

        # 1. Sample K answers to each prompt and rank them. (The file of --data has them already.)
        if not args.data:
            groups = ranked_answers(model, tokenizer, groups, args.num_generations, args)
            made += groups
        samples += sum(len(group["rows"]) for group in groups)

        # 2. Pair. Where all answers tie there is nothing to learn.
        ranked = [group for group in groups if group["pairs"]]
        pairs += sum(len(group["pairs"]) for group in ranked)

        # 3. Update: on the pairs of all prompts at once, or on one prompt's after the other's.
        scores = torch.zeros(0, device=args.device)
        for batch in [ranked] if ranked and args.batching == "mixed" else [[group] for group in ranked]:
            scores = torch.cat([scores, backward(model, tokenizer, batch, args)])
            grad_norm = torch.nn.utils.clip_grad_norm_(trained, 1.0)
            if not (scores.isfinite().all() and grad_norm.isfinite()):
                raise ArithmeticError(f"step {step}: a score or the gradient is not finite (its norm: {grad_norm})")
            optimizer.step()
            optimizer.zero_grad()

        # 4. Report.
        better, worse, weights = pair_rows(ranked, args.device)
        loss, metrics = reward_loss(scores[better], scores[worse], weights=weights)
        metrics |= {"loss": loss, "mean_score": scores.mean() if ranked else 0.0, "pairs": len(better)}
        metrics["frac_tied_prompts"] = 1 - len(ranked) / len(groups)
        yield {"step": step, "samples": samples, **metrics}
    if pairs == 0:
        raise ArithmeticError("all answers to all prompts tied, so there was nothing to rank and nothing was learned")


def backward(model, tokenizer, groups, args):
    """Add the gradient of the loss over all pairs of these groups. Returns the scores of their answers, (N,).

    A micro-batch is made of whole groups, so that each answer is encoded once and each pair has both its scores in it.
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
    """The pairs of all groups, with their answers laid end to end: rows better (P,), worse (P,) and weights (P,)."""
    pairs, first = [], 0
    for group in groups:
        K = len(group["rows"])
        pairs += [(first + better, first + worse, 1 / math.comb(K, 2)) for better, worse in group["pairs"]]
        first += K
    better, worse, weights = zip(*pairs, strict=True) if pairs else ((), (), ())
    index = {"dtype": torch.long, "device": device}
    return torch.tensor(better, **index), torch.tensor(worse, **index), torch.tensor(weights, device=device)


# ---------------------------------------------------------------- command line and files


def parse_args(argv):
    """The options of this script, checked."""
    parser = common_options(steps=120, learning_rate=3e-3)
    add = parser.add_argument
    add("--prompts", type=Path, help="file of prompts to use instead of the built-in ones, one a line")
    add("--data", type=Path, help="JSONL file of pairs to train on instead; every tenth of its prompts is held out")
    add("--prompts-per-step", type=int, default=16, help="prompts in a batch")
    add("--num-generations", type=int, default=4, help="answers to each prompt, 2 to 9: K")
    add("--batching", choices=["mixed", "by-prompt"], default="mixed", help="an update on all, or one a prompt")
    args = check_args(parser.parse_args(argv))
    if not 2 <= args.num_generations <= 9:
        stop(f"--num-generations must be 2 to 9, not {args.num_generations}: people rank no more than 9 answers")
    if args.data and args.prompts:
        stop("--data has prompts of its own: leave out --prompts")
    return args


def main(argv=None):
    """Train, from the command line or from Python: main(["--steps", "5"]). Returns the summary."""
    args = parse_args(argv)
    prompts = read_prompts(args.prompts) if args.prompts else PROMPTS
    pairs = drop_ties(read_pairs(args.data)) if args.data else []
    model, tokenizer = load(args)
    check_context(model, tokenizer, prompts + HELD_OUT_PROMPTS, args)
    material, held_out = split(group_pairs(pairs, model, tokenizer, args), args) if args.data else (prompts, None)
    # SEQ_CLS: peft trains and saves the layer named score beside the adapter. It is float32, whatever --dtype.
    model.score = torch.nn.Linear(model.config.hidden_size, 1, bias=False, device=args.device)
    config = LoraConfig(r=8, lora_alpha=32, lora_dropout=0.0, target_modules=args.lora_targets, task_type="SEQ_CLS")
    model, made = get_peft_model(model, config).eval(), []

    @functools.cache
    def sets():
        """Two sets of 8 answers to each of the 16 held-out prompts, the same for every --seed."""
        with torch.random.fork_rng():
            torch.manual_seed(0)
            return [g for _ in range(2) for g in ranked_answers(model, tokenizer, HELD_OUT_PROMPTS, 8, args)]

    def write(folder):
        model.save_pretrained(folder, save_embedding_layers=False)
        if made:
            lines = [
                {"prompt": group["prompt"], "chosen": group["answers"][better], "rejected": group["answers"][worse]}
                for group in made
                for better, worse in group["pairs"]
            ]
            text = "".join(json.dumps(line, ensure_ascii=False) + "\n" for line in lines)
            (folder / "pairs.jsonl").write_text(text, encoding="utf-8")

    return run(
        args,
        model,
        records=train(model, tokenizer, material, made, args),
        judge=lambda: evaluate_scores(model, tokenizer, sets(), held_out or sets(), args),
        write=write,
        shown={"loss": "loss", "accuracy": "accuracy", "margin": "margin"},
    )


def stop(sentence, status=2):
    """End the script with one sentence on stderr: a mistake by the user has exit status 2."""
    print(f"{Path(__file__).name}: {sentence}", file=sys.stderr)
    raise SystemExit(status)


def common_options(**defaults):
    """A parser with the options that all four scripts have."""
    kind = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], **kind)
    parser.error, add = stop, parser.add_argument
    add("--model", help="name on the hub or folder of a causal language model; tiny_llama is the embedded one")
    add("--lora-targets", nargs="+", default=["q_proj", "v_proj"], help="names of the layers that get an adapter")
    add("--out", type=Path, default=Path("runs") / Path(__file__).stem, help="folder for the results")
    add("--steps", type=int, help="training steps")
    add("--seed", type=int, default=0, help="same seed, same CPU: same numbers")
    add("--device", default="auto", help="auto, cpu, cuda, ...")
    add("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of the frozen weights")
    add("--learning-rate", type=float, help="of AdamW, constant")
    add("--max-completion-length", type=int, default=32, help="tokens a completion may have")
    add("--micro-batch-size", type=int, default=16, help="sequences in a forward and backward pass")
    add("--temperature", type=float, default=1.0, help="of sampling and of every log-prob")
    parser.set_defaults(**defaults)
    return parser


def check_args(args):
    """Refuse what cannot work before anything is loaded; device and dtype become torch's."""
    for name, value in vars(args).items():
        zero_allowed = name in ("seed", "beta", "kl_coef", "lam", "label_smoothing", "missing_eos_penalty")
        if type(value) in (int, float) and not (0 < value < math.inf or zero_allowed and value == 0):
            stop(f"--{name.replace('_', '-')} must be {'at least' if zero_allowed else 'above'} 0, not {value}")
    if args.device == "auto":
        args.device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        args.device = torch.empty(0, device=args.device).device
    except (RuntimeError, AssertionError) as error:
        stop(f"--device {args.device} cannot be used here: {str(error).splitlines()[0]}")
    if args.dtype == "auto":
        bf16 = args.device.type == "cuda" and torch.cuda.get_device_capability(args.device) >= (8, 0)
        args.dtype = "bfloat16" if bf16 else "float32"
    args.dtype = getattr(torch, args.dtype)
    new, old = (args.out.with_name(args.out.name + ending) for ending in (".new", ".old"))
    if old.exists() and not args.out.exists():
        old.rename(args.out)  # a run was killed between the two renames of save
    if args.out.exists() and not (args.out / "summary.json").exists():
        stop(f"--out {args.out} is there and is no earlier result: name another folder")
    try:
        new.mkdir(parents=True, exist_ok=True)
        shutil.rmtree(new)
    except OSError as error:
        stop(f"--out {args.out} cannot be written: {error.strerror}")
    torch.manual_seed(args.seed)
    return args


def read_prompts(path):
    """The lines of a UTF-8 file that are not blank."""
    try:
        lines = [line.strip() for line in path.read_text(encoding="utf-8-sig").split("\n")]
    except (OSError, UnicodeDecodeError) as error:
        stop(f"--prompts {path} cannot be read: {error}")
    return [line for line in lines if line] or stop(f"--prompts {path} has no line that is not blank")


def read_pairs(path):
    """The pairs of a UTF-8 file, one JSON object a line with the texts "prompt", "chosen" and "rejected"."""
    try:
        lines = path.read_bytes().removeprefix(b"\xef\xbb\xbf").split(b"\n")  # not splitlines: U+2028 is text
    except OSError as error:
        stop(f"--data {path} cannot be read: {error.strerror}")
    pairs = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            pair = json.loads(line.decode())
            if not isinstance(pair, dict):
                raise ValueError("it is no JSON object")
            for name in ("prompt", "chosen", "rejected"):
                if not isinstance(pair.get(name), str):
                    raise ValueError(f"it has no text {name!r}")
                pair[name].encode()  # half a surrogate pair is no text
            if not pair["prompt"].strip():
                raise ValueError("its prompt is empty")
        except json.JSONDecodeError as error:
            stop(f"--data {path}, line {number}: it is not JSON: {error.msg}, column {error.colno}")
        except (ValueError, RecursionError) as error:
            stop(f"--data {path}, line {number}: {error}")
        pairs.append(pair)
    return pairs or stop(f"--data {path} holds no pairs")


def drop_ties(pairs):
    """The pairs that can be ranked: without those whose answers are identical or blank, counted in a line of output."""
    good = [p for p in pairs if p["chosen"].strip() and p["rejected"].strip() and p["chosen"] != p["rejected"]]
    if len(good) < len(pairs):
        print(f"{len(pairs) - len(good)} pairs with identical or blank answers are skipped")
    return good or stop("--data: no pair is left to learn from")


def group_pairs(pairs, model, tokenizer, args):
    """Make groups (see ranked_answers) of pairs: up to 9 answers to one prompt whose pairs stand together.

    An answer of fewer than max_completion_length tokens is finished and gets its EOS; a longer one counts as cut off.
    What exceeds the context is cut from the prompt's left; a pair for which that is not enough is skipped and counted.
    """
    context = getattr(model.config, "max_position_embeddings", 10**9)
    groups, skipped = [], 0

    def encode(text, end=()):
        ids = tokenizer(text, add_special_tokens=False).input_ids
        return ids + list(end) if len(ids) < args.max_completion_length else ids

    for pair in pairs:
        texts = [pair["chosen"], pair["rejected"]]
        if max(len(encode(text, [tokenizer.eos_token_id])) for text in texts) >= context:
            skipped += 1
            continue
        if not groups or groups[-1]["prompt"] != pair["prompt"] or len({*groups[-1]["answers"], *texts}) > 9:
            groups.append({"prompt": pair["prompt"], "answers": [], "pairs": []})
        answers = groups[-1]["answers"]
        answers += [text for text in texts if text not in answers]
        groups[-1]["pairs"].append((answers.index(texts[0]), answers.index(texts[1])))
    for group in groups:
        answers = [encode(text, [tokenizer.eos_token_id]) for text in group["answers"]]
        prompt = encode(group["prompt"])[-(context - max(map(len, answers))) :]  # the same cut for all answers
        group["rows"] = [torch.tensor(prompt + ids, device=args.device) for ids in answers]
    if skipped:
        print(f"{args.data}: {skipped} pairs with an answer longer than the context are skipped")
    return groups


def split(groups, args):
    """(groups to train on, groups held out): every tenth prompt is held out."""
    prompts = list(dict.fromkeys(group["prompt"] for group in groups))
    if len(prompts) < 11:
        stop(f"--data {args.data} has {len(prompts)} prompts; it takes 11 or more, since every tenth is held out")
    held_out = set(prompts[::10])
    return [g for g in groups if g["prompt"] not in held_out], [g for g in groups if g["prompt"] in held_out]


def check_context(model, tokenizer, prompts, args):
    """Refuse prompts that leave no room for a completion in the model's context."""
    length = max(len(ids) for ids in tokenizer(prompts, add_special_tokens=False).input_ids)
    context = getattr(model.config, "max_position_embeddings", math.inf)
    if length + args.max_completion_length > context:
        stop(
            f"{length} tokens of prompt and {args.max_completion_length} of completion exceed the context of {context}"
        )


def estimate(values):
    """{"mean", "standard_error", "n"} of some numbers."""
    values = torch.tensor(list(values), dtype=torch.float64)
    return {"mean": values.mean().item(), "standard_error": values.std().item() / len(values) ** 0.5, "n": len(values)}


def run(args, model, *, records, judge, write, shown):
    """Judge, train behind a progress bar, judge again, report, save. Returns the summary.

    Ctrl-C, or a loss or reward that is not finite: the weights of the last whole step are saved; exit status 130 or 2.
    """
    start, history, summary, stopped = time.perf_counter(), [], {}, None
    trained = [p for p in model.parameters() if p.requires_grad]
    count, trained_count = sum(p.numel() for p in model.parameters()), sum(p.numel() for p in trained)
    print(f"{args.model}: {count:,} parameters, {trained_count:,} trained, {args.device}, {str(args.dtype)[6:]}")

    def held_out(when):
        estimates, texts = judge()
        for name, value in estimates.items():
            print(f"held-out {name} {when}: {value['mean']:.3f} ± {value['standard_error']:.3f}")
            summary[f"{name}_{when}"] = value
        return texts

    try:
        texts_before = held_out("before")
        with tqdm(total=args.steps, unit="step") as bar:
            for record in records:
                history.append({name: round(float(value), 6) for name, value in record.items()})
                good = [p.detach().clone() for p in trained]
                bar.set_postfix({label: f"{record[name]:.3f}" for label, name in shown.items() if name in record})
                bar.update()
        texts_after = held_out("after")
        for (prompt, old), (_, new) in list(zip(texts_before, texts_after, strict=True))[:2]:
            print(f"{prompt} ...\n  before: {old!r}\n  after:  {new!r}")
    except KeyboardInterrupt:
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # a second Ctrl-C ends at once
        stopped = "interrupted"
    except ArithmeticError as error:
        stopped = str(error)
    if not history:
        stop(f"{stopped}; no step was finished, so nothing is saved", 130 if stopped == "interrupted" else 2)
    for p, value in zip(trained, good, strict=True):
        p.data.copy_(value)
    curves = {label: [r[name] for r in history] for label, name in shown.items() if name in history[0]}
    for label, values in curves.items():
        print(f"{label:>{max(map(len, curves))}} {sparkline(values)} {values[0]:.3f} to {values[-1]:.3f}")
    summary |= {"model": args.model, "options": vars(args), "steps": len(history), "samples": history[-1]["samples"]}
    summary |= {
        "seconds": time.perf_counter() - start,
        "peak_memory_mb": peak_memory_mb(args.device),
        "stopped": stopped,
    }
    save(args.out, write, history, summary, curves)
    print(f"saved in {args.out}")
    if stopped:
        stop(f"{stopped}; what is saved are the weights of step {len(history)}", 130 if stopped == "interrupted" else 2)
    return summary


def save(out, write, history, summary, curves):
    """Write everything beside the folder `out`, then rename: it holds the old result or the new one, never half."""
    new, old = out.with_name(out.name + ".new"), out.with_name(out.name + ".old")
    shutil.rmtree(new, ignore_errors=True)
    new.mkdir(parents=True)
    write(new)
    (new / "metrics.jsonl").write_text("".join(json.dumps(record) + "\n" for record in history), encoding="utf-8")
    (new / "summary.json").write_text(json.dumps(summary, indent=2, default=str) + "\n", encoding="utf-8")
    if importlib.util.find_spec("matplotlib"):
        from matplotlib.figure import Figure

        figure = Figure(figsize=(7, 2 * len(curves)), layout="constrained")
        for axes, (label, values) in zip(figure.subplots(len(curves), squeeze=False).flat, curves.items(), strict=True):
            axes.plot(range(1, len(values) + 1), values)
            axes.set(xlabel="step", ylabel=label)
        figure.savefig(new / "curves.png")
    shutil.rmtree(old, ignore_errors=True)
    if out.exists():
        out.rename(old)
    new.rename(out)
    shutil.rmtree(old, ignore_errors=True)


def sparkline(values, width=60):
    """The values as a row of bars, each the mean of its share of them."""
    width = min(width, len(values))
    parts = [values[i * len(values) // width : (i + 1) * len(values) // width] for i in range(width)]
    means = [sum(part) / len(part) for part in parts]
    low, span = min(means), max(means) - min(means) or 1
    return "".join("▁▂▃▄▅▆▇█"[int((mean - low) / span * 7.99)] for mean in means)


def peak_memory_mb(device):
    """The most memory that tensors on the GPU, or else this process, have held; None on Windows."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    if not importlib.util.find_spec("resource"):
        return None
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (2**20 if sys.platform == "darwin" else 2**10)


if __name__ == "__main__":
    try:
        main()
    except KeyboardInterrupt:
        stop("interrupted before training began", 130)
