"""reward_model.py's part of the sanity suite: B2-B7."""

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, get_peft_model

import reward_model

HERE = Path(__file__).resolve().parent
MODEL = os.environ.get("TEST_MODEL", "tiny_llama")
NAN = math.nan


def close(value, expected, why, tolerance=1e-6):
    value, expected = torch.as_tensor(value, dtype=torch.float64), torch.as_tensor(expected, dtype=torch.float64)
    torch.testing.assert_close(value, expected, rtol=tolerance, atol=tolerance, msg=lambda text: f"{why}\n{text}")


def float64(*values):
    return torch.tensor(values, dtype=torch.float64, requires_grad=True)


# ---------------------------------------------------------------- ranked_pairs


@pytest.mark.parametrize("K, count", [(2, 1), (3, 3), (4, 6), (9, 36)])
def test_B5_K_ranked_answers_make_K_times_K_minus_1_over_2_pairs(K, count):
    pairs = reward_model.ranked_pairs(torch.randperm(K).tolist())
    assert len(pairs) == len(set(pairs)) == count == K * (K - 1) // 2, "each two answers are one pair"


def test_B5_the_better_answer_stands_first_and_ties_are_left_out():
    assert sorted(reward_model.ranked_pairs([0.5, 1.0, 0.5])) == [(1, 0), (1, 2)], "0.5 and 0.5 are no pair"
    assert sorted(reward_model.ranked_pairs(torch.tensor([3.0, 1.0, 2.0]))) == [(0, 1), (0, 2), (2, 1)]
    assert reward_model.ranked_pairs([0.0, 0.0]) == [], "nothing to learn where all answers tie"


# ---------------------------------------------------------------- reward_loss


@pytest.mark.parametrize("gap, expected", [(0.0, 0.693147), (1.0, 0.313262), (-1.0, 1.313262)])
def test_B5_the_loss_is_minus_log_sigmoid_of_the_difference(gap, expected):
    # ln 2; ln(1 + 1/e); ln(1 + e). 50 on both scores changes nothing: only the difference counts.
    for offset in (0.0, 50.0):
        loss, metrics = reward_model.reward_loss(torch.tensor([offset + gap]), torch.tensor([offset]))
        close(loss, expected, "-log sigmoid(chosen - rejected)")
        close(metrics["margin"], gap, "margin is chosen - rejected")
        assert metrics["accuracy"] == (gap > 0), "right order only where chosen is above rejected: a tie is not"


def test_B5_K_2_is_bradley_terry():
    # P(0 beats 1) = e^s0 / (e^s0 + e^s1), and the loss is its -log
    s = torch.tensor([0.3, -1.2], dtype=torch.float64)
    loss, _ = reward_model.reward_loss(s[:1], s[1:])
    close(loss, -s.softmax(0)[0].log(), "K = 2 is Bradley-Terry", 1e-12)


def test_B5_three_answers_by_hand():
    # scores 2, 1, 0, ranked in this order: gaps 1, 1, 2 -> (0.313262 x 2 + 0.126928) / 3
    scores = float64(2, 1, 0)
    better, worse, weights = reward_model.pair_rows([{"rows": [0] * 3, "pairs": [(0, 1), (1, 2), (0, 2)]}], "cpu")
    loss, _ = reward_model.reward_loss(scores[better], scores[worse], weights=weights)
    close(loss, 0.251151, "mean over the 3 pairs")
    loss.backward()
    # d/ds0 = -(sigmoid(-1) + sigmoid(-2)) / 3 = -(0.268941 + 0.119203) / 3; s1 wins once and loses once by 1: 0
    close(scores.grad, [-0.129381, 0, 0.129381], "the best answer is pushed up by both its pairs")


def test_B5_prompts_of_4_2_and_3_answers_count_the_same():
    # Open-Assistant's RMLoss on the same scores, best first within a prompt (recorded): the mean of the prompts' means.
    scores = float64(-1.0475493192917231, 0.36706934789287643, 0.38753278340875547, 1.8382482151095312,
                     1.5602131758317697, 3.8717520002002703,
                     -0.6926605323147021, -4.697721427573063, -0.18493336515537095)  # fmt: skip
    groups = [{"rows": [0] * K, "pairs": reward_model.ranked_pairs(range(K, 0, -1))} for K in (4, 2, 3)]
    better, worse, weights = reward_model.pair_rows(groups, "cpu")
    close(weights, [1 / 6] * 6 + [1] + [1 / 3] * 3, "each pair of K answers weighs 1 / C(K, 2)")
    loss, _ = reward_model.reward_loss(scores[better], scores[worse], weights=weights)
    close(loss, 1.9856165619294293, "each prompt weighs 1, whatever its K")


def test_a_tie_leaves_the_other_pairs_their_weight():
    # answers rated 1, 0, 0: pairs (0, 1) and (0, 2), each 1/3, not 1/2
    _, _, weights = reward_model.pair_rows([{"rows": [0] * 3, "pairs": reward_model.ranked_pairs([1, 0, 0])}], "cpu")
    close(weights, [1 / 3, 1 / 3], "1 / C(3, 2) each")


@pytest.mark.parametrize("gap, loss_is, gradient", [(100.0, 0.0, 0.0), (-100.0, 100.0, -1.0), (-1000.0, 1000.0, -1.0)])
def test_differences_of_100_and_more_stay_finite(gap, loss_is, gradient):
    chosen, rejected = torch.tensor([gap], requires_grad=True), torch.zeros(1, requires_grad=True)
    loss, _ = reward_model.reward_loss(chosen, rejected)
    loss.backward()
    close(loss, loss_is, "no log of a sigmoid that has become 0")
    close(torch.stack([chosen.grad, rejected.grad]).flatten(), [gradient, -gradient], "gradient -sigmoid(-gap), and +")


def test_a_margin_is_what_the_difference_should_exceed():
    chosen, rejected = torch.tensor([1.0, 3.0]), torch.tensor([0.0, 1.0])
    # gaps 1 and 2, less 1 and 3: 0 and -1 -> (0.693147 + 1.313262) / 2
    loss, metrics = reward_model.reward_loss(chosen, rejected, margin=torch.tensor([1.0, 3.0]))
    close(loss, 1.003204, "one margin a pair, no broadcasting to pairs of pairs")
    close(metrics["accuracy"], 1.0, "accuracy is about the order, not the margin")


def test_a_pair_of_weight_0_has_no_influence_and_no_pairs_give_0():
    for bad in (NAN, math.inf, 1e4):
        chosen, rejected = float64(1, bad), float64(0, bad)
        loss, metrics = reward_model.reward_loss(chosen, rejected, torch.tensor([0, bad]), torch.tensor([2.0, 0.0]))
        loss.backward()
        close(loss, 0.313262, f"{bad} under weight 0 has no influence on the value")
        close(chosen.grad, [-0.268941, 0], f"{bad} under weight 0 has no influence on the gradient")
        close(torch.stack(list(metrics.values())), [1, 1], f"{bad} under weight 0 has no influence on a metric")
    chosen = float64(1, NAN)
    loss, metrics = reward_model.reward_loss(chosen, float64(0, 0), weights=torch.zeros(2))
    loss.backward()
    assert loss == 0 and (chosen.grad == 0).all() and not any(metrics.values()), "no weight: value and gradient 0"
    empty = torch.zeros(0, requires_grad=True)
    assert reward_model.reward_loss(empty, empty)[0] == 0, "no pairs: 0, never NaN"


def test_the_gradient_is_the_derivative_of_the_value():
    torch.manual_seed(0)
    inputs = [torch.randn(5, dtype=torch.float64, requires_grad=True) for _ in range(2)]
    weights = torch.rand(5, dtype=torch.float64)
    assert torch.autograd.gradcheck(lambda c, r: reward_model.reward_loss(c, r, 0.3, weights)[0], inputs)


# ---------------------------------------------------------------- last_token_scores


def test_B4_B6_the_score_is_read_at_the_last_real_token_wherever_the_padding_is():
    scores = torch.arange(20.0).view(4, 5).requires_grad_()
    mask = torch.tensor([[1, 1, 1, 0, 0], [0, 0, 1, 1, 1], [0, 1, 1, 0, 0], [1, 0, 1, 1, 0]])  # right, left, both, hole
    for kind in (torch.long, torch.bool, torch.float32):
        read = reward_model.last_token_scores(scores, mask.to(kind))
        close(read, [2, 9, 12, 18], f"the last 1 of each row of a {kind} mask, by position and not by count")
    read.sum().backward()
    close(scores.grad.nonzero(), [[0, 2], [1, 4], [2, 2], [3, 3]], "only this one position gets gradient")


def test_scores_of_padding_have_no_influence_and_an_empty_row_scores_0():
    for bad in (NAN, math.inf):
        scores = torch.tensor([[bad, 7.0, bad], [bad, bad, bad]], requires_grad=True)
        read = reward_model.last_token_scores(scores, torch.tensor([[0, 1, 0], [0, 0, 0]]))
        read.sum().backward()
        close(read, [7, 0], f"{bad} under mask 0")
        close(scores.grad, [[0, 1, 0], [0, 0, 0]], f"{bad} under mask 0: gradient")


# ---------------------------------------------------------------- with a model


@pytest.fixture(scope="module")
def scorer(tmp_path_factory):
    """(args, model, tokenizer) with a random head and adapters that are not 0."""
    args = reward_model.parse_args(
        ["--model", MODEL, "--device", "cpu", "--out", str(tmp_path_factory.mktemp("x") / "x")]
    )
    model, tokenizer = reward_model.load(args)
    model.score = torch.nn.Linear(model.config.hidden_size, 1, bias=False)
    model = get_peft_model(model, LoraConfig(r=8, target_modules=args.lora_targets, task_type="SEQ_CLS")).eval()
    for name, p in model.named_parameters():
        if "lora_B" in name:
            torch.nn.init.normal_(p, std=0.05)
    return args, model, tokenizer


def rows_of(tokenizer, count=8):
    texts = [prompt + " was happy." * (i % 3) for i, prompt in enumerate(reward_model.PROMPTS[:count])]
    ids = tokenizer(texts, add_special_tokens=False).input_ids
    return [torch.tensor(row + [tokenizer.eos_token_id] * (i % 2)) for i, row in enumerate(ids)]


def padded(rows, pad, side):
    width = max(map(len, rows)) + 3
    fill = [torch.full((width - len(row),), pad) for row in rows]
    join = [(f, r) if side == "left" else (r, f) for r, f in zip(rows, fill, strict=True)]
    mask = [(torch.zeros_like(f), torch.ones_like(r)) for r, f in zip(rows, fill, strict=True)]
    mask = mask if side == "left" else [pair[::-1] for pair in mask]
    return torch.stack([torch.cat(x) for x in join]), torch.stack([torch.cat(x) for x in mask])


@torch.no_grad()
def test_B6_a_batch_scores_like_one_by_one_padded_left_or_right_also_where_pad_is_eos(scorer):
    _, model, tokenizer = scorer
    rows, head = rows_of(tokenizer), model.get_base_model().score
    alone = torch.cat([reward_model.answer_scores(model, [row], 0) for row in rows])
    assert alone.std() > 1e-3, "the texts differ, so must the scores"
    close(reward_model.answer_scores(model, rows, 0), alone, "a batch scores like its rows alone", 1e-4)
    for pad in (tokenizer.pad_token_id, tokenizer.eos_token_id):
        for side in ("left", "right"):
            ids, mask = padded(rows, pad, side)
            scores = reward_model.token_scores(model, head, ids, mask)
            close(reward_model.last_token_scores(scores, mask), alone, f"pad {pad} on the {side} changes nothing", 1e-4)


def test_B7_both_batchings_have_the_same_gradient_on_the_same_prompts(scorer):
    # mixed: mean over all prompts. by-prompt: one prompt after the other; the mean of these gradients is the same.
    args, model, tokenizer = scorer
    rows = rows_of(tokenizer, 12)
    groups = [{"rows": rows[i : i + 4], "pairs": reward_model.ranked_pairs([0, 2, 1, 3])} for i in (0, 4, 8)]
    trained = [p for p in model.parameters() if p.requires_grad]

    def gradient(batches, micro_batch_size=16):
        model.zero_grad()
        for batch in batches:
            options = argparse.Namespace(device=args.device, micro_batch_size=micro_batch_size)
            scores = reward_model.backward(model, tokenizer, batch, options)
        return torch.cat([p.grad.flatten() for p in trained]), scores

    mixed, scores = gradient([groups])
    assert scores.shape == (12,), "one score an answer: 12 passes for 18 pairs, not 36"
    close(gradient([[g] for g in groups])[0] / 3, mixed, "same prompts, same gradient", 1e-5)
    close(gradient([groups], micro_batch_size=8)[0], mixed, "micro-batches of 2 and 1 prompts change nothing", 1e-5)


def test_an_answer_is_encoded_once_not_once_a_pair(scorer):
    args, model, tokenizer = scorer
    group = {"rows": rows_of(tokenizer, 4), "pairs": reward_model.ranked_pairs([0, 1, 2, 3])}
    seen = []
    hook = model.get_base_model().base_model.register_forward_pre_hook(
        lambda module, positional, keywords: seen.append(len(keywords["input_ids"])), with_kwargs=True
    )
    reward_model.backward(model, tokenizer, [group], args)
    hook.remove()
    model.zero_grad()
    assert sum(seen) == 4, "6 pairs of 4 answers take 4 passes"


# ---------------------------------------------------------------- --data


def write(path, text):
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


LINE = '{"prompt": "a", "chosen": " b", "rejected": " c"}'


def test_a_file_with_bom_crlf_blank_lines_and_line_separators_is_read(tmp_path, capsys):
    separator = '{"prompt": "x\u2028y", "chosen": " b", "rejected": " c", "more": 1}'
    rows = reward_model.read_pairs(write(tmp_path / "f", f"\ufeff{LINE}\r\n\r\n  \n{separator}"))
    assert [row["prompt"] for row in rows] == ["a", "x\u2028y"], "U+2028 stands inside a text, it ends no line"
    assert capsys.readouterr().out == ""


def test_identical_and_blank_answers_are_skipped_and_counted(tmp_path, capsys):
    same, blank = LINE.replace(" c", " b"), LINE.replace(" c", "")
    assert len(reward_model.read_pairs(write(tmp_path / "f", "\n".join([LINE, same, blank])))) == 1
    assert "2 pairs" in capsys.readouterr().out


@pytest.mark.parametrize(
    "text, why",
    [
        (f"{LINE}\n{{oops}}", "line 2: no JSON"),
        (f"{LINE}\n[1]", "line 2: not an object"),
        (f'{LINE}\n\n{{"prompt": "a", "chosen": " b"}}', "line 3: rejected is missing"),
        (LINE.replace('" b"', "[1]"), "line 1: chosen is no text"),
        (LINE.replace('"a"', '" "'), "line 1: prompt is blank"),
        ("", "no pair"),
        (LINE.replace(" c", " b"), "no pair"),
        (b"\xff\xfe", "cannot be read"),
    ],
)
def test_a_bad_line_is_named_with_its_number_and_what_is_wrong(tmp_path, capsys, text, why):
    with pytest.raises(SystemExit) as end:
        reward_model.read_pairs(write(tmp_path / "f", text))
    error = capsys.readouterr().err
    assert end.value.code == 2 and why in error and error.count("\n") == 1, "one sentence, exit status 2"


def test_pairs_of_one_prompt_become_one_group_with_each_answer_once(scorer):
    args, model, tokenizer = scorer
    answers = [f" {word} day." for word in ("good", "nice", "sad", "bad")]
    pairs = [{"prompt": "One", "chosen": answers[i], "rejected": answers[j]} for i in range(4) for j in range(i + 1, 4)]
    groups = reward_model.group_pairs([*pairs, pairs[0] | {"prompt": "Two"}], model, tokenizer, args)
    assert [len(g["rows"]) for g in groups] == [4, 2] and [len(g["pairs"]) for g in groups] == [6, 1]
    assert [row[-1] for row in groups[0]["rows"]] == [tokenizer.eos_token_id] * 4, "a finished answer ends in its EOS"
    assert not any(tokenizer.eos_token_id in row[:-1] for row in groups[0]["rows"]), "and has no EOS inside (A2)"


def test_too_long_a_prompt_loses_its_left_end_and_too_long_an_answer_its_row(scorer, capsys):
    args, model, tokenizer = scorer
    context = model.config.max_position_embeddings
    pair = {"prompt": "Once" + " more and" * context, "chosen": " good day.", "rejected": " bad."}
    (group,) = reward_model.group_pairs([pair, pair | {"chosen": pair["prompt"]}], model, tokenizer, args)
    assert max(map(len, group["rows"])) == context, "as much of the prompt as there is room for"
    chosen, rejected = (tokenizer(pair[x], add_special_tokens=False).input_ids for x in ("chosen", "rejected"))
    heads = [row[: -len(ids) - 1].tolist() for row, ids in zip(group["rows"], (chosen, rejected), strict=True)]
    assert heads[0] == heads[1], "the same cut for both answers of a pair"
    assert "1 pairs" in capsys.readouterr().out, "a skipped pair is counted"


# ---------------------------------------------------------------- the script


@pytest.mark.parametrize(
    "arguments, why",
    [
        (["--num-generations", "1"], "2 to 9"),
        (["--num-generations", "10"], "2 to 9"),
        (["--data", "nowhere.jsonl"], "cannot be read"),
        (["--data", "x", "--prompts", "y"], "leave out --prompts"),
        (["--batching", "both"], "invalid choice"),
    ],
)
def test_bad_options_end_in_one_sentence_before_any_training(tmp_path, capsys, arguments, why):
    with pytest.raises(SystemExit) as end:
        reward_model.main(["--model", MODEL, "--out", str(tmp_path / "out"), *arguments])
    error = capsys.readouterr().err
    assert end.value.code == 2 and why in error and error.count("\n") == 1


@pytest.mark.parametrize("rated, why", [(0, "held-out prompts tied"), (256, "nothing to rank")])
def test_answers_that_all_tie_are_an_error(tmp_path, capsys, monkeypatch, rated, why):
    happiness = iter([1.0, 0.0] * (rated // 2))  # of the 16 x 16 held-out answers, if at all
    monkeypatch.setattr(reward_model, "happiness", lambda text: next(happiness, 0.0))
    few = ["--steps", "1", "--prompts-per-step", "1", "--max-completion-length", "2", "--num-generations", "2"]
    with pytest.raises(SystemExit) as end:
        reward_model.main(["--model", MODEL, "--out", str(tmp_path / "out"), *few])
    assert end.value.code == 2 and why in capsys.readouterr().err


# Scores two texts with transformers' and peft's own classes, in a process and under a seed of its own.
LOAD = """
import json, sys, torch
from peft import PeftModel
from transformers import AutoModelForSequenceClassification
torch.manual_seed(123)
base, folder, rows = json.loads(sys.argv[1])
base = AutoModelForSequenceClassification.from_pretrained(base, num_labels=1, dtype=torch.float32)
model = PeftModel.from_pretrained(base, folder).eval()
with torch.no_grad():
    print(json.dumps([model(input_ids=torch.tensor([row])).logits.item() for row in rows]))
"""


def test_the_saved_adapter_scores_the_same_in_a_new_process_and_its_pairs_can_be_read_back(tmp_path):
    few = ["--steps", "2", "--learning-rate", "0.05", "--device", "cpu", "--out", str(tmp_path / "rm")]
    summary = reward_model.main(["--model", MODEL, *few])
    assert summary["steps"] == 2 and 0 <= summary["accuracy_after"]["mean"] <= 1
    args = reward_model.parse_args(["--model", MODEL, "--device", "cpu", "--out", str(tmp_path / "rm")])
    model, tokenizer = reward_model.load(args)
    rows = [row.tolist() for row in rows_of(tokenizer, 4)]
    sent = json.dumps([model.name_or_path, str(tmp_path / "rm"), rows])
    answer = subprocess.run([sys.executable, "-c", LOAD, sent], capture_output=True, text=True, check=True).stdout
    from safetensors.torch import load_file

    weights = load_file(tmp_path / "rm" / "adapter_model.safetensors")
    model.score = torch.nn.Linear(model.config.hidden_size, 1, bias=False)
    model = get_peft_model(model, LoraConfig(r=8, lora_alpha=32, target_modules=args.lora_targets, task_type="SEQ_CLS"))
    state = {k.replace(".weight", ".default.weight") if "lora" in k else k: v for k, v in weights.items()}
    state["base_model.model.score.modules_to_save.default.weight"] = state.pop("base_model.model.score.weight")
    assert not model.load_state_dict(state, strict=False).unexpected_keys, "adapter and head, and nothing else"
    with torch.no_grad():
        own = reward_model.answer_scores(model.eval(), [torch.tensor(row) for row in rows], tokenizer.pad_token_id)
    close(json.loads(answer), own, "AutoModelForSequenceClassification + PeftModel give the same scores", 1e-5)
    pairs = reward_model.read_pairs(tmp_path / "rm" / "pairs.jsonl")
    groups = reward_model.group_pairs(pairs, model, tokenizer, args)
    assert len(groups) <= 2 * 16 and all(2 <= len(g["rows"]) <= 9 for g in groups), "a group a prompt"


def test_B2_a_run_puts_80_percent_of_the_held_out_pairs_in_the_right_order(tmp_path):
    summary = reward_model.main(["--model", MODEL, "--device", "cpu", "--out", str(tmp_path / "rm")])
    assert summary["accuracy_after"]["mean"] >= 0.8
    gain = summary["best_of_8_after"]["mean"] - summary["happiness_after"]["mean"]
    best = summary["best_of_8_by_rater_after"]["mean"] - summary["happiness_after"]["mean"]
    assert gain >= 0.5 * best, "picking by score gets more than half of what picking by happiness gets"
