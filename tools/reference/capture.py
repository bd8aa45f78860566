#!/usr/bin/env python3
"""Answers a corpus with transformers on a Kev checkpoint and writes an acceptance capture; or times fixed workloads.

This is what a plain PyTorch user gets: every question is one causal row, state then branch; rows are right-padded to the
longest of their batch, which never reaches a real token. The pointer head is FP32.

    omni-kev tokens EXPORT --corpus CORPUS > TOKENS
    capture.py --checkpoint DIR --export EXPORT --corpus CORPUS --tokens TOKENS --out FILE [--dtype float32|bfloat16]
    capture.py --checkpoint DIR --time [--dtype bfloat16]

`float32` merges the adapter into FP32 weights and never rounds the sum; `bfloat16` rounds it once, as peft does, and
rounds every buffer of the model too, as a service does that calls `.to(torch.bfloat16)`. TF32 is off.
"""

import argparse
import hashlib
import json
import math
import pathlib
import random
import re
import statistics
import struct
import sys
import time

import peft
import torch
import transformers
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

PREFIXES = ("base_model.model.model.language_model.", "base_model.model.model.", "base_model.model.")
SHORT_TEXT, SHORT_QUESTIONS = 45, [38, 52, 30, 44, 36, 48]
LONG_TEXT, LONG_QUESTIONS = 2200, [40] * 5


def load_model(checkpoint, dtype, device):
    """The text backbone with the adapter merged, and the head with its temperature."""
    backbone = AutoModelForCausalLM.from_pretrained(checkpoint / "base", dtype=dtype).model.to(device).eval()
    config = json.loads((checkpoint / "adapter" / "adapter_config.json").read_text())
    adapter = load_file(checkpoint / "adapter" / "adapter_model.safetensors")
    scale = config["lora_alpha"] / config["r"]
    modules = dict(backbone.named_modules())
    merged = 0
    for key, lora_a in adapter.items():
        if not key.endswith(".lora_A.weight"):
            continue
        name = key.removesuffix(".lora_A.weight")
        prefix = next(prefix for prefix in PREFIXES if name.startswith(prefix))
        weight = modules[name.removeprefix(prefix)].weight
        lora_b = adapter[key.replace("lora_A", "lora_B")]
        delta = (lora_b.float().to(device) @ lora_a.float().to(device)) * scale
        weight.data = (weight.data.float() + delta).to(weight.dtype)
        merged += 1
    if merged * 2 != len(adapter):
        sys.exit(f"merged {merged} of {len(adapter) // 2} modules")
    head = torch.load(checkpoint / "adapter" / "head.pt", weights_only=True, map_location="cpu")
    state = {key: value.float().to(device) for key, value in head["head"].items()}
    # Buffers too: this is where a service's rotary frequencies become BF16.
    return backbone.to(dtype), state, float(head["temperature"])


@torch.inference_mode()
def run_batch(backbone, head, rows, device):
    """Pointer logits of each row, on the device."""
    longest = max(len(row["ids"]) for row in rows)
    ids = torch.zeros(len(rows), longest, dtype=torch.long)
    mask = torch.zeros(len(rows), longest, dtype=torch.long)
    for index, row in enumerate(rows):
        ids[index, : len(row["ids"])] = torch.tensor(row["ids"])
        mask[index, : len(row["ids"])] = 1
    padded = bool((mask == 0).any())
    hidden = backbone(
        input_ids=ids.to(device), attention_mask=mask.to(device) if padded else None, use_cache=padded
    ).last_hidden_state
    logits = []
    for index, row in enumerate(rows):
        h = hidden[index].float()
        query = h[row["decide"]] @ head["q.weight"].T + head["q.bias"]
        keys = h[row["ends"]] @ head["k.weight"].T + head["k.bias"]
        logits.append((keys @ query) / math.sqrt(query.numel()))
    return logits


def cublaslt_version():
    """Version of the library that torch has loaded, e.g. 130100; None without one."""
    import ctypes

    maps = pathlib.Path("/proc/self/maps")
    loaded = maps.read_text().splitlines() if maps.exists() else []
    path = next((line.split()[-1] for line in loaded if "libcublasLt.so" in line), None)
    if path is None:
        return None
    library = ctypes.CDLL(path)
    library.cublasLtGetVersion.restype = ctypes.c_size_t
    return library.cublasLtGetVersion()


def rounded(value):
    return round(float(value), 4)


def answer(kind, names, options, p):
    """The typed answer that probabilities give (f64 sums, every number rounded once)."""
    if kind == "noul":
        return {"type": "noul", "noul": rounded(p[1])}
    total = sum(p)
    normal = [value / total for value in p] if total > 0 else [1 / len(p)] * len(p)
    best = max(range(len(p)), key=lambda index: p[index])
    count = len(p)
    if kind == "choice":
        confidence = 1.0 if count == 1 else (normal[best] - 1 / count) / (1 - 1 / count)
        return {
            "type": "choice",
            "choice": names[best],
            "confidence": rounded(confidence),
            "probabilities": {name: rounded(value) for name, value in zip(names, p)},
        }
    spread = sum(abs(index - (count - 1) / 2) for index in range(count)) / count
    near = sum(value * abs(index - best) for index, value in enumerate(normal))
    confidence = 1.0 if count == 1 else max(0.0, 1 - near / spread)
    return {
        "type": "score",
        "score": rounded(sum(index * value for index, value in enumerate(p))),
        "legend": {str(index): text for index, text in enumerate(options)},
        "probabilities": {str(index): rounded(value) for index, value in enumerate(p)},
        "confidence": rounded(confidence),
    }


def sha256(data):
    return hashlib.sha256(data).hexdigest()


def read_cases(corpus, tokens):
    """(name, request, tokens) of every answered case, and the names of refused ones, in order."""
    records = [json.loads(line) for line in pathlib.Path(tokens).read_text().splitlines()]
    lines = [json.loads(line) for line in pathlib.Path(corpus).read_text().splitlines() if line.strip()]
    for line, record in zip(lines, records, strict=True):
        if line["name"] != record["name"]:
            sys.exit(f"{tokens} does not belong to {corpus}: {record['name']} for {line['name']}")
        request = line.get("request") or json.loads(line["request_text"])
        yield line["name"], request, record, line.get("expected", {})


def check_tokens(tokenizer, record):
    """Tokenises the rendered texts again and compares: the ids come from the worker, the tokenizer is transformers'."""

    def encode(text):
        escaped = re.sub(r"<\|([A-Za-z0-9_]+)\|>", "<\u00a6\\1\u00a6>", text)
        return tokenizer.encode(escaped, add_special_tokens=False)

    token = tokenizer.convert_tokens_to_ids
    if record["state"]["ids"] != [token("<|fim_prefix|>")] + encode(record["state"]["text"]):
        sys.exit(f"{record['name']}: the state's ids differ")
    for question in record["questions"]:
        ids = [token("<|fim_middle|>")] + encode(question["instructions"])
        for option in question["options"]:
            ids += [token("<|box_start|>")] + encode(option) + [token("<|box_end|>")]
        if question["ids"] != ids + [token("<|fim_suffix|>")]:
            sys.exit(f"{record['name']} {question['id']}: the question's ids differ")


def capture(backbone, head, temperature, args):
    tokenizer = AutoTokenizer.from_pretrained(args.checkpoint / "base")
    cases = list(read_cases(args.corpus, args.tokens))
    for _, _, record, _ in cases:
        if "error" not in record:
            check_tokens(tokenizer, record)
    rows = []
    for name, _, record, _ in cases:
        if "error" in record:
            continue
        state = record["state"]["ids"]
        for question in record["questions"]:
            offset = len(state)
            rows.append({
                "key": (name, question["id"]),
                "ids": state + question["ids"],
                "decide": offset + question["decide"],
                "ends": [offset + end for end in question["option_ends"]],
            })
    order = sorted(range(len(rows)), key=lambda index: len(rows[index]["ids"]))
    outputs = {}
    for start in range(0, len(order), args.batch):
        picked = [rows[index] for index in order[start : start + args.batch]]
        for row, logits in zip(picked, run_batch(backbone, head, picked, args.device)):
            logits = logits.float().cpu()
            outputs[row["key"]] = (logits, torch.softmax(logits / temperature, 0))
    more = {
        "producer": "transformers, one causal row a question",
        "profile": f"transformers {args.dtype}",
        "batch": args.batch,
    }
    write_capture(args, tokenizer, cases, outputs, temperature, more)


def write_capture(args, tokenizer, cases, outputs, temperature, more):
    """Writes a capture: `outputs` has logits and probabilities by case and question id, `more` goes into the header."""
    header = {
        "omni_kev_capture": 1,
        **more,
        "manifest_sha256": sha256((args.export / "kev_export.json").read_bytes()),
        "corpus_sha256": sha256(pathlib.Path(args.corpus).read_bytes()),
        "device": torch.cuda.get_device_name() if args.device == "cuda" else "cpu",
        "temperature": temperature,
        "torch": torch.__version__,
        "cuda": torch.version.cuda,
        "cublaslt": cublaslt_version(),
        "transformers": transformers.__version__,
        "peft": peft.__version__,
        "unix_time": int(time.time()),
    }
    lines = [header]
    for name, request, record, expected in cases:
        if "error" in record:
            lines.append({"name": name, "error": "refused"})
            continue
        answers = {}
        for question in record["questions"]:
            asked = request["questions"][question["id"]]
            criteria = asked.get("criteria")
            names = list(criteria) if asked["type"] == "choice" else None
            p = [float(value) for value in outputs[(name, question["id"])][1]]
            answers[question["id"]] = answer(asked["type"], names, question["options"], p)
        output_tokens = len(tokenizer.encode(json.dumps(answers), add_special_tokens=False))
        for question in record["questions"]:
            logits, p = outputs[(name, question["id"])]
            ids = record["state"]["ids"] + question["ids"]
            lines.append({
                "name": name,
                "id": question["id"],
                "type": answers[question["id"]]["type"],
                "ids_sha256": sha256(struct.pack(f"<{len(ids)}I", *ids)),
                "readouts": {"decide": question["decide"], "option_ends": question["option_ends"]},
                "logits": [float(value) for value in logits],
                "logits_hex": [struct.pack(">f", float(value)).hex() for value in logits],
                "probabilities": [float(value) for value in p],
                "usage": {"input_tokens": record["input_tokens"], "output_tokens": output_tokens},
                "answer": answers[question["id"]],
                "expected": expected.get(question["id"]),
            })
    pathlib.Path(args.out).write_text("".join(json.dumps(line) + "\n" for line in lines))
    print(f"{len(outputs)} questions -> {args.out}")


def timing(backbone, head, args):
    """Model time of the workloads of docs/performance.md, whole rows, without a cache."""
    draw = random.Random(0)
    for name, text, questions in [("L1", SHORT_TEXT, SHORT_QUESTIONS), ("L3", LONG_TEXT, LONG_QUESTIONS)]:
        times = []
        for _ in range(args.repeat + 3):
            state = [draw.randrange(2000) for _ in range(text)]
            rows = [
                {"ids": state + [draw.randrange(2000) for _ in range(length)], "decide": text + length - 1,
                 "ends": [text + length - 4, text + length - 2]}
                for length in questions
            ]
            if args.device == "cuda":
                torch.cuda.synchronize()
            begin = time.perf_counter()
            for logits in run_batch(backbone, head, rows, args.device):
                logits.cpu()
            times.append((time.perf_counter() - begin) * 1e3)
        print(f"{name}: transformers {args.dtype}, {len(questions)} rows, median {statistics.median(times[3:]):.2f} ms")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoint", type=pathlib.Path, required=True)
    parser.add_argument("--export", type=pathlib.Path, help="the export whose manifest the capture names")
    parser.add_argument("--corpus")
    parser.add_argument("--tokens", help="what `omni-kev tokens --corpus` printed")
    parser.add_argument("--out")
    parser.add_argument("--time", action="store_true", help="time fixed workloads instead of capturing")
    parser.add_argument("--repeat", type=int, default=20)
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--batch", type=int, default=16)
    args = parser.parse_args()
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    backbone, head, temperature = load_model(args.checkpoint, getattr(torch, args.dtype), args.device)
    if args.time:
        timing(backbone, head, args)
    else:
        capture(backbone, head, temperature, args)


if __name__ == "__main__":
    main()
