"""DPO: make the better of two answers more likely than the worse one, measured against the reference; no reward model.

    L(theta) = -log sigmoid(beta (log(pi_theta(y_w|x) / pi_ref(y_w|x))  -  log(pi_theta(y_l|x) / pi_ref(y_l|x))))

    x: the prompt      y_w: the chosen answer      y_l: the rejected answer      log pi(y|x): the sum over y's tokens

In memory: one model. The policy is its frozen weights plus a LoRA adapter; the reference is the same weights with the
adapter switched off; its log-probs of the pairs never change, so they are computed once, before training. The data is
off-policy: the answers are sampled before training, by the model itself, and happiness() pairs the best with the worst.

    python dpo.py                           # babylm/babyllama-100m-2024; or tiny_llama, if it cannot be had
    python dpo.py --data runs/dpo/pairs.jsonl --loss-type apo_zero  # the same pairs again, or a file of your own

DPO (arXiv 2305.18290); dpo_loss cites the papers of its twelve variants.
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
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaForCausalLM, logging

# ---------------------------------------------------------------- the loss


def sequence_log_probs(log_probs, mask, average=False):
    """log pi(y|x) = sum over the answer's tokens of log pi(y_t | x, y_<t): (B, T), (B, T) -> (B,).

    mask: 1 = a token of the answer, its EOS included. What stands under 0 has no influence. average=True divides by the
    number of tokens, as TRL does for IPO. An empty row gives 0.
    Shown by B14 in test_losses.py: -1 - 2 - 4 = -7, on average -2.333333.
    """
    mask = mask.bool()
    total = torch.where(mask, log_probs, 0.0).sum(dim=1)
    return total / mask.sum(dim=1).clamp(min=1) if average else total


def dpo_loss(chosen, rejected, ref_chosen, ref_rejected, *, beta=0.1, loss_type="sigmoid", label_smoothing=0.0,
             f_divergence_type="reverse_kl", reference_free=False, alpha_divergence_coef=1.0,
             discopop_tau=0.05):  # fmt: skip
    """DPO and its family. Returns (losses, chosen_rewards, rejected_rewards), each (B,), the rewards detached.

    chosen, rejected, ref_chosen, ref_rejected: (B,) log-probs of the answers under policy and reference: sums over
    their tokens, for ipo means (see sequence_log_probs). reference_free: the reference's log-probs count as 0.
    The rewards are beta * (policy - reference), DPO's implicit reward.

    With  c = chosen - ref_chosen,  r = rejected - ref_rejected,  h = f(c) - f(r),  L(x) = -log sigmoid(x),
    S(x) = (1 - s) L(x) + s L(-x),  s = label_smoothing, the share of pairs thought to be labelled the wrong way round:

        sigmoid    S(beta h)                                                   DPO, 2305.18290 eq. 7 (s > 0: cDPO)
        robust     ((1 - s) L(beta h) - s L(-beta h)) / (1 - 2 s)              rDPO, 2403.00409
        exo_pair   KL((p, q) || (1 - s, s)), p, q = sigmoid(+-beta h)          EXO, 2402.00856 eq. 16; s = 0 is 1e-3
        hinge      max(0, 1 - beta h)                                          RSO, 2309.06657, after SLiC, 2305.10425
        ipo        (h - 1 / (2 beta))^2                                        IPO, 2310.12036 eq. 17
        bco_pair   L(beta c - d) + L(d - beta r), d = mean of the rewards      BCO, 2404.04656 (TRL 0.19: running mean)
        sppo_hard  (c - 1 / (2 beta))^2 + (r + 1 / (2 beta))^2                 SPPO, 2405.00675 eq. 4.7
        nca_pair   L(beta c) + L(-beta c) / 2 + L(-beta r) / 2                 NCA, 2402.05369
        aot_pair   S(beta (sort(c) - sort(r)))                                 AOT, 2406.05882, unpaired
        aot        S(beta (sort(chosen - rejected) - sort(ref_chosen - ref_rejected)))     AOT, paired
        apo_zero   sigmoid(-beta c) + sigmoid(beta r)                          APO, 2408.06266 eq. 7
        apo_down   sigmoid(beta c) + sigmoid(-x), x = beta (c - r)             APO, 2408.06266 eq. 8
        discopop   (1 - m) L(x) + m exp(-x), m = sigmoid(x / discopop_tau)     DiscoPOP, 2406.08414 eq. 5

    f is f_divergence_type (f-DPO, 2309.16240 table 1, in the log-ratio u; constants cancel): "reverse_kl" u,
    "js_divergence" log sigmoid(u), "alpha_divergence" -exp(-alpha u) / alpha (alpha = 1: the forward KL). Exponents
    are at most 40, so that even ipo's square is finite. At tau 0.05 discopop rises from x = -0.12 to 0.07: from 0, the
    start, it first lowers the margin. bco_pair, aot_pair and aot compare the pairs of a batch, so a loss there belongs
    to no single pair. Names, and the numbers of EXO's, SPPO's, APO's and DiscoPOP's equations, are TRL 0.19's.
    Shown by B14-B17 in test_losses.py: sigmoid starts at ln 2; c = 1, r = -1 gives 0.598139, with s = 0.1 0.618139.
    """
    if reference_free:
        ref_chosen = ref_rejected = torch.zeros_like(chosen)
    check_loss_options(beta, loss_type, label_smoothing, f_divergence_type)
    f = {
        "reverse_kl": lambda u: u,
        "js_divergence": F.logsigmoid,
        "alpha_divergence": lambda u: -torch.exp((-alpha_divergence_coef * u).clamp(max=40)) / alpha_divergence_coef,
    }[f_divergence_type]
    c, r, s = chosen - ref_chosen, rejected - ref_rejected, label_smoothing
    h, x, half = f(c) - f(r), beta * (c - r), 1 / (2 * beta)
    p, q, e = torch.sigmoid(beta * h), torch.sigmoid(-beta * h), s or 1e-3
    d, m = beta * torch.cat([c, r]).detach().mean(), torch.sigmoid(x / discopop_tau)

    def L(x):
        return -F.logsigmoid(x)

    def S(x):
        return (1 - s) * L(x) + s * L(-x)

    losses = {
        "sigmoid": lambda: S(beta * h),
        "robust": lambda: ((1 - s) * L(beta * h) - s * L(-beta * h)) / (1 - 2 * s),
        "exo_pair": lambda: -p * (L(beta * h) + math.log(1 - e)) - q * (L(-beta * h) + math.log(e)),
        "hinge": lambda: F.relu(1 - beta * h),
        "ipo": lambda: (h - half).square(),
        "bco_pair": lambda: L(beta * c - d) + L(d - beta * r),
        "sppo_hard": lambda: (c - half).square() + (r + half).square(),
        "nca_pair": lambda: L(beta * c) + L(-beta * c) / 2 + L(-beta * r) / 2,
        "aot_pair": lambda: S(beta * (c.sort().values - r.sort().values)),
        "aot": lambda: S(beta * ((chosen - rejected).sort().values - (ref_chosen - ref_rejected).sort().values)),
        "apo_zero": lambda: torch.sigmoid(-beta * c) + torch.sigmoid(beta * r),
        "apo_down": lambda: torch.sigmoid(beta * c) + torch.sigmoid(-x),
        "discopop": lambda: (1 - m) * L(x) + m * torch.exp((-x).clamp(max=40)),
    }
    return losses[loss_type](), beta * c.detach(), beta * r.detach()


def check_loss_options(beta, loss_type, label_smoothing, f_divergence_type):
    """ValueError for an unknown name, a number out of range, or an option that the loss does not read."""
    divergent, smoothed = "sigmoid robust exo_pair hinge ipo".split(), "sigmoid robust exo_pair aot_pair aot".split()
    losses = divergent + "bco_pair sppo_hard nca_pair aot_pair aot apo_zero apo_down discopop".split()
    divergences = "reverse_kl js_divergence alpha_divergence".split()
    if not beta > 0:
        raise ValueError(f"beta is {beta}; it must be above 0: at 0 the policy would not matter")
    if loss_type not in losses:
        raise ValueError(f"unknown loss_type {loss_type!r}: {', '.join(losses)}")
    if f_divergence_type not in divergences:
        raise ValueError(f"unknown f_divergence_type {f_divergence_type!r}: {', '.join(divergences)}")
    if not 0 <= label_smoothing < 0.5:
        raise ValueError(f"label_smoothing is {label_smoothing}; it must be at least 0 and below 0.5")
    if label_smoothing and loss_type not in smoothed:
        raise ValueError(f"loss_type {loss_type!r} does not read label_smoothing; {', '.join(smoothed)} do")
    if f_divergence_type != "reverse_kl" and loss_type not in divergent:
        raise ValueError(f"loss_type {loss_type!r} does not read f_divergence_type; {', '.join(divergent)} do")


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


def token_log_probs(model, input_ids, attention_mask, num_tokens, temperature=1.0):
    """log softmax(logits / temperature) at the last num_tokens of input_ids: (B, L), (B, L) -> (B, T), T = num_tokens.

    The logits at position t predict token t + 1, so they are read one position earlier. temperature is what the tokens
    were sampled with. The result is float32. Columns that are padding in every row are left out and get 0; at least one
    completion token must be real.
    Shown by A6 and A7 in test_losses.py.
    """
    used = attention_mask.any(dim=0)  # (L,)
    behind = int((~used[-num_tokens:]).sum())  # columns that are padding after the longest completion
    input_ids, attention_mask, num_tokens = input_ids[:, used], attention_mask[:, used], num_tokens - behind
    logits = model(
        input_ids=input_ids[:, :-1],  # the last token predicts nothing we need
        attention_mask=attention_mask[:, :-1],
        position_ids=(attention_mask.cumsum(dim=1) - 1).clamp(min=0)[:, :-1],
        use_cache=False,
        logits_to_keep=torch.arange(-num_tokens, 0),  # only the completion's; indices, because a number is slower
    ).logits.float()  # (B, T, V)
    logits = logits if temperature == 1 else logits / temperature
    targets = input_ids[:, -num_tokens:]  # (B, T)
    log_probs = -F.cross_entropy(logits.flatten(0, 1), targets.flatten(), reduction="none").view_as(targets)
    return F.pad(log_probs, (0, behind))


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


@torch.no_grad()
def evaluate(model, tokenizer, args):
    """16 answers to each of the 16 held-out prompts: their happiness and the mean k1 of their KL, in nats per token.

    Returns ({"happiness": estimate, "kl": estimate}, [(prompt, answer), ...]). A KL that is not finite stops the run.
    """
    with torch.random.fork_rng():
        torch.manual_seed(0)  # the same draws before and after, whatever --seed
        # (256, L), (256, L), (256, T), 256 texts, (256, T)
        ids, attention_mask, mask, texts, log_probs = complete(model, tokenizer, HELD_OUT_PROMPTS * 16, args)
    kl = []
    with model.disable_adapter():
        for rows in mask.sum(dim=1).argsort().split(args.micro_batch_size):  # rows of similar length: little padding
            ref = token_log_probs(model, ids[rows], attention_mask[rows], mask.shape[1], args.temperature)  # (B, T)
            kl += (log_probs[rows] - ref)[mask[rows].bool()].tolist()
    if not all(map(math.isfinite, kl)):
        raise FloatingPointError("the log-probs of the held-out answers are not finite")
    estimates = {"happiness": estimate(map(happiness, texts)), "kl": estimate(kl)}
    return estimates, list(zip(HELD_OUT_PROMPTS, texts, strict=False))


# ---------------------------------------------------------------- preference pairs


def make_pairs(model, tokenizer, prompts, args):
    """Pairs of num_generations answers to each prompt, by their happiness: [{"prompt", "chosen", "rejected"}, ...].

    The best with the worst; then, up to pairs_per_prompt and not for HELD_OUT_PROMPTS, the second best with the second
    worst and so on. Where two answers are equally good there is nothing to choose: no pair. An answer that
    max_completion_length cut short of its EOS is marked: "chosen_truncated" or "rejected_truncated".
    """
    pairs, K = [], args.num_generations
    for start in tqdm(range(0, len(prompts), 32), desc="making pairs", unit="batch", leave=False):
        batch = [prompt for prompt in prompts[start : start + 32] for _ in range(K)]
        ids, _, mask, texts, _ = complete(model, tokenizer, batch, args)
        ended = (ids[:, -mask.shape[1] :] == tokenizer.eos_token_id).any(dim=1).tolist()
        scores = [happiness(text) for text in texts]
        for first in range(0, len(batch), K):
            worst_first = sorted(range(first, first + K), key=scores.__getitem__)
            count = 1 if batch[first] in HELD_OUT_PROMPTS else args.pairs_per_prompt
            for worst, best in zip(worst_first[:count], worst_first[::-1], strict=False):
                if scores[best] > scores[worst]:
                    pair = {"prompt": batch[first], "chosen": texts[best], "rejected": texts[worst]}
                    rows = {"chosen": best, "rejected": worst}
                    pairs.append(pair | {f"{name}_truncated": True for name, row in rows.items() if not ended[row]})
    return pairs


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


def pair_log_probs(model, pairs, args):
    """Yields, micro-batch by micro-batch, the indices of b pairs and their log-probs (2, b): chosen, rejected.

    Both answers go through the model in one pass; the loss's mask is the last T columns of the attention mask:

        chosen    . . p p p c c c E          p: the prompt, left-padded; c, r: the answer, right-padded; E: its EOS
        rejected  . . p p p r E . .          attention mask 0 0 1 1 1 1 1 0 0, the loss's 1 1 0 0
    """
    order = sorted(range(len(pairs)), key=lambda i: max(len(pairs[i]["chosen"]), len(pairs[i]["rejected"])))
    size = max(1, args.micro_batch_size // 2)
    for rows in (order[i : i + size] for i in range(0, len(order), size)):  # of like length: little padding
        texts = [(pairs[i]["prompt"], pairs[i][name]) for name in ("chosen", "rejected") for i in rows]
        P, T = max(len(prompt) for prompt, _ in texts), max(len(answer) for _, answer in texts)
        ids = [[0] * (P - len(p)) + p + a + [0] * (T - len(a)) for p, a in texts]
        attention_mask = [[0] * (P - len(p)) + [1] * len(p + a) + [0] * (T - len(a)) for p, a in texts]
        ids, attention_mask = torch.tensor([ids, attention_mask], device=args.device)  # (2b, L) each
        log_probs = token_log_probs(model, ids, attention_mask, T, args.temperature)  # (2b, T)
        average = args.loss_type == "ipo"  # its target, 1 / (2 beta), is the same for answers of any length
        yield rows, sequence_log_probs(log_probs, attention_mask[:, -T:], average).view(2, -1)


@torch.no_grad()
def all_log_probs(model, pairs, args):
    """The log-probs of N pairs without a gradient, (2, N): chosen, rejected."""
    log_probs = torch.zeros(2, len(pairs), device=args.device)
    for rows, values in pair_log_probs(model, pairs, args):
        log_probs[:, rows] = values
    return log_probs


# ---------------------------------------------------------------- training


def train(model, pairs, args):
    """DPO (2305.18290, section 4) on encoded pairs. Yields the metrics of a step when the step is done."""
    trained = [p for p in model.parameters() if p.requires_grad]
    optimizer = torch.optim.AdamW(trained, args.learning_rate, weight_decay=0)
    # 1. The reference's log-probs, once for all steps: the same model without its adapter.
    start = time.perf_counter()
    with model.disable_adapter():
        reference = all_log_probs(model, pairs, args)  # (2, N)
    tqdm.write(f"reference log-probs of {len(pairs)} pairs: {time.perf_counter() - start:.1f} s")

    queue = []
    for step in range(1, args.steps + 1):
        # 2. A batch of B pairs. Every pair is used once before any is used again.
        while len(queue) < args.prompts_per_step:
            queue += torch.randperm(len(pairs)).tolist()
        batch, queue = queue[: args.prompts_per_step], queue[args.prompts_per_step :]
        batch, ref = [pairs[i] for i in batch], reference[:, batch]  # (2, B)

        # 3. Every micro-batch computes the loss of the whole batch, but only its own rows carry a gradient; those
        #    add up to the batch's. A loss that compares pairs needs the true values of all rows, hence a first pass
        #    without gradient; to any other loss the remaining rows do not matter, so the reference's values do.
        coupled = args.loss_type in ("bco_pair", "aot_pair", "aot") and 2 * len(batch) > args.micro_batch_size
        log_probs = all_log_probs(model, batch, args) if coupled else ref  # (2, B)
        for rows, new in pair_log_probs(model, batch, args):
            log_probs = log_probs.detach().clone()
            log_probs[:, rows] = new
            pair_metrics(log_probs, ref, args)["loss"].mean().backward()

        # 4. Update and report.
        metrics = {name: values.mean() for name, values in pair_metrics(log_probs.detach(), ref, args).items()}
        loss, grad_norm = metrics["loss"], torch.nn.utils.clip_grad_norm_(trained, 1.0)
        if not (loss.isfinite() and grad_norm.isfinite()):
            raise FloatingPointError(f"step {step}: the loss is {loss}, the norm of its gradient {grad_norm}")
        optimizer.step()
        optimizer.zero_grad()
        yield {"step": step, "samples": step * 2 * len(batch), **metrics, "grad_norm": grad_norm}


def pair_metrics(log_probs, ref, args):
    """The loss and metrics of each of N pairs, by TRL's names: (2, N), (2, N) -> {name: (N,)}."""
    names = ("beta", "loss_type", "label_smoothing", "f_divergence_type", "reference_free")
    losses, chosen, rejected = dpo_loss(*log_probs, *ref, **{name: getattr(args, name) for name in names})
    return {
        "loss": losses,
        "rewards/margins": chosen - rejected,
        "rewards/accuracies": (chosen > rejected).float(),  # a tie, as with policy = reference, counts as wrong
        "rewards/chosen": chosen,
        "rewards/rejected": rejected,
        "logps/chosen": log_probs[0].detach(),
        "logps/rejected": log_probs[1].detach(),
    }


def evaluate_pairs(model, pairs, args):
    """pair_metrics of held-out pairs: {name: estimate}."""
    with model.disable_adapter():
        ref = all_log_probs(model, pairs, args)
    metrics = pair_metrics(all_log_probs(model, pairs, args), ref, args)
    return {name: estimate(values.tolist()) for name, values in metrics.items()}


# ---------------------------------------------------------------- command line and files


def parse_args(argv):
    """The options of this script, checked."""
    kind = {"formatter_class": argparse.ArgumentDefaultsHelpFormatter, "allow_abbrev": False}
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], **kind)
    parser.error, add = stop, parser.add_argument
    add("--model", help="name on the hub or folder of a causal language model; tiny_llama is the embedded one")
    add("--lora-targets", nargs="+", default=["q_proj", "v_proj"], help="names of the layers that get an adapter")
    add("--out", type=Path, default=Path("runs") / Path(__file__).stem, help="folder for the results, replaced")
    add("--steps", type=int, default=48, help="training steps")
    add("--seed", type=int, default=0, help="same seed, same CPU: same numbers")
    add("--device", default="cuda" if torch.cuda.is_available() else "cpu", help="cpu, cuda, cuda:1, ...")
    add("--dtype", choices=["auto", "float32", "bfloat16"], default="auto", help="of the frozen weights")
    add("--learning-rate", type=float, default=3e-3, help="of AdamW, constant")
    add("--max-completion-length", type=int, default=32, help="tokens a completion may have")
    add("--micro-batch-size", type=int, default=16, help="sequences in a training pass")
    add("--temperature", type=float, default=1.0, help="of sampling and of every log-prob")
    source = parser.add_mutually_exclusive_group().add_argument
    source("--data", type=Path, help="JSONL file of pairs (prompt, chosen, rejected); without it the model makes them")
    source("--prompts", type=Path, help="file to make pairs from instead of the built-in prompts, one a line")
    add("--pairs", type=int, default=384, help="pairs to try to make and train on; a quarter more is held out")
    add("--pairs-per-prompt", type=int, default=1, help="best and worst; then second best and second worst; ...")
    add("--num-generations", type=int, default=8, help="answers that a pair is the best and the worst of")
    add("--prompts-per-step", type=int, default=16, help="pairs in a batch")
    add("--beta", type=float, default=0.3, help="how much it costs to leave the reference")
    add("--loss-type", default="sigmoid", help="sigmoid, ipo, hinge, ...: dpo_loss has all thirteen")
    add("--label-smoothing", type=float, default=0.0, help="share of pairs taken to be labelled the wrong way round")
    add("--f-divergence-type", default="reverse_kl", help="reverse_kl, js_divergence or alpha_divergence")
    add("--reference-free", action="store_true", help="a loss without the reference")
    args = check_args(parser.parse_args(argv))
    if args.num_generations < 2 * args.pairs_per_prompt:
        stop("--pairs-per-prompt must be at most half of --num-generations: no answer is in two pairs")
    try:
        pair_metrics(*torch.zeros(2, 2, 1), args)  # dpo_loss refuses options that do not go together
    except ValueError as error:
        stop(str(error))
    return args


def main(argv=None):
    """Train, from the command line or from Python: main(["--steps", "5"]). Returns the summary."""
    start, args = time.perf_counter(), parse_args(argv)
    pairs = read_pairs(args.data) if args.data else []
    model, tokenizer = load(args)
    prompts = read_prompts(args, model, tokenizer)
    if not args.data:
        begun = time.perf_counter()
        count = math.ceil(args.pairs / args.pairs_per_prompt)
        parts = (prompts, count), (HELD_OUT_PROMPTS, max(count // 4, len(HELD_OUT_PROMPTS)))
        asked = [part[i % len(part)] for part, count in parts for i in range(count)]
        pairs = make_pairs(model, tokenizer, asked, args)
        seconds = time.perf_counter() - begun
        print(f"{len(pairs)} pairs from {len(asked)} prompts made in {seconds:.1f} s; equally good answers make none")
    context = getattr(model.config, "max_position_embeddings", math.inf)
    encoded, held_out = (encode_pairs(tokenizer, part, context) for part in split_pairs(pairs))
    too_long = len(pairs) - len(encoded) - len(held_out)
    print(f"{len(encoded)} pairs to train on, {len(held_out)} held out; {too_long} left out, too long for the context")
    if not encoded:
        stop("no pair is left to train on")

    config = LoraConfig(r=8, lora_alpha=32, lora_dropout=0.0, target_modules=args.lora_targets, task_type="CAUSAL_LM")
    torch.manual_seed(args.seed)  # the same run whether the pairs were made or read
    model = get_peft_model(model, config).eval()  # LoRA's B is 0 at the start: policy and reference are equal

    def judge():
        estimates, texts = evaluate(model, tokenizer, args)
        return estimates | (evaluate_pairs(model, held_out, args) if len(held_out) > 1 else {}), texts

    def write(folder):
        model.save_pretrained(folder, save_embedding_layers=False)
        (folder / "pairs.jsonl").write_text("".join(json.dumps(pair) + "\n" for pair in pairs), encoding="utf-8")

    shown = "loss rewards/margins rewards/accuracies rewards/chosen rewards/rejected logps/chosen logps/rejected"
    shown = {name: name for name in shown.split()}
    summary = run(args, model, start, train(model, encoded, args), judge, write, shown)
    if len(held_out) > 1:  # most losses reward only the margin: it may grow while both answers become less likely
        names = "rewards/margins", "logps/chosen", "logps/rejected"
        margin, *changes = (summary[f"{name}_after"]["mean"] - summary[f"{name}_before"]["mean"] for name in names)
        chosen, rejected = (f"{'rose' if change > 0 else 'fell'} by {abs(change):.3f}" for change in changes)
        print(f"held-out pairs: the margin changed by {margin:+.3f}", end=", ")
        print(f"the log-probs of the chosen answers {chosen}, those of the rejected ones {rejected}")
    return summary


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
