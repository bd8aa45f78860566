#!/usr/bin/env python3
"""Answers a corpus with the passes of the official service, on transformers, and writes an acceptance capture.

A request is a STATE pass and ROW passes (one causal row a question, continuing the state's cache). In the bucketed form
passes are padded to the shapes that the service records as CUDA graphs: states on the left, rows on the right, with
additive masks; in the eager form nothing is padded but rows to the longest of their pass. The head is FP32.

    service.py capture --checkpoint DIR --export EXPORT --corpus CORPUS --tokens TOKENS --out FILE [--form bucketed|eager]
                       [--together 1]
    service.py trace   --checkpoint DIR --tokens TOKENS --case NAME --out FILE
    service.py kernels --checkpoint DIR

`trace` writes what enters and leaves every layer of every pass of one request, as safetensors. `kernels` lists what torch
runs in a state pass and a row pass. Weights are merged on the device in FP32, TF32 off, and rounded once; every buffer is
rounded to BF16 too.
"""

import argparse
import math
import pathlib
import sys

import capture
import torch
from safetensors.torch import save_file
from transformers import DynamicCache

# Limits of the passes that are padded; longer ones run as they are.
GRAPH_TOKENS, BANK_TOKENS = 1024, 4096
STATES_A_PASS, ROWS_A_PASS, TOKENS_A_PASS, EAGER_TOKENS = 16, 32, 32_768, 16_384
SMALLEST_PASS = 256
CACHED_STATES, CACHED_TOKENS = 4, 65_536


def power_of_two(n):
    return 1 << max(0, n - 1).bit_length()


def bucket(n, parts=8, floor=16):
    """n rounded up to a multiple of an eighth of the power of two above it, at least `floor`."""
    step = max(floor, power_of_two(n) // parts)
    return -(-n // step) * step


def count_bucket(n):
    return bucket(n, 4, 1)


def bank(longest):
    return max(16, power_of_two(longest))


def grouped(lengths, most):
    """Groups of indices: consecutive lengths in sorted order, so that the sum of max(256, count x length) of all groups,
    both padded, is least; `most(longest, length)` bounds a group. Of equal sums the one with the larger last group."""
    order = sorted(range(len(lengths)), key=lambda index: lengths[index])
    best, cut = [0], [0]
    for end in range(1, len(order) + 1):
        choice = None
        longest = bucket(lengths[order[end - 1]])
        for start in range(end - 1, -1, -1):
            count = end - start
            if count > most(order[start:end], longest):
                break
            cost = best[start] + max(SMALLEST_PASS, count_bucket(count) * longest)
            if choice is None or cost <= choice[0]:
                choice = (cost, start)
        best.append(choice[0])
        cut.append(choice[1])
    groups, end = [], len(order)
    while end > 0:
        groups.append(order[cut[end] : end])
        end = cut[end]
    return groups[::-1]


class Service:
    """The passes over one model. A state is kept as per-layer tensors of its own."""

    def __init__(self, backbone, head, device, form="bucketed"):
        self.backbone, self.head, self.device, self.bucketed = backbone, head, device, form == "bucketed"
        self.config, self.dtype = backbone.config, backbone.dtype
        self.kinds = self.config.layer_types
        self.width = self.config.linear_conv_kernel_dim
        self.kept = {}  # tokens of a state -> its tensors, oldest first
        self.trace = None

    def run(self, name, ids, positions, full_mask, linear_mask, past):
        if self.trace is not None:
            self.trace_pass(name)
        masks = {"full_attention": full_mask, "linear_attention": linear_mask}
        output = self.backbone(
            input_ids=ids, attention_mask=masks, position_ids=positions, past_key_values=past, use_cache=True
        ).last_hidden_state
        if self.trace is not None:
            self.trace[f"{self.prefix}.output"] = output
        return output

    def trace_pass(self, name):
        self.prefix = f"{len(self.passes):02}.{name}"
        self.passes.append(name)

    def watch(self, inside=None):
        """From here on what goes from layer to layer is kept, and what goes on inside one layer."""
        self.trace, self.passes = {}, []

        def keep(index):
            def hook(_module, arguments, keywords, output):
                hidden = arguments[0] if arguments else keywords["hidden_states"]
                if index == 0:
                    self.trace[f"{self.prefix}.layer00.in"] = hidden.clone()
                value = output[0] if isinstance(output, tuple) else output
                self.trace[f"{self.prefix}.layer{index:02}.out"] = value.clone()

            return hook

        def inner(index, what):
            def hook(_module, _arguments, output):
                value = output[0] if isinstance(output, tuple) else output
                self.trace[f"{self.prefix}.layer{index:02}.{what}"] = value.clone()

            return hook

        def before(index, what):
            def hook(_module, arguments, _output):
                self.trace[f"{self.prefix}.layer{index:02}.{what}"] = arguments[0].clone()

            return hook

        for index, layer in enumerate(self.backbone.layers):
            layer.register_forward_hook(keep(index), with_kwargs=True)
            mixer = layer.linear_attn if hasattr(layer, "linear_attn") else layer.self_attn
            mixer.register_forward_hook(inner(index, "mixer"))
            if index == inside:
                for name, module in mixer.named_children():
                    if isinstance(module, torch.nn.Linear) and not name.startswith("o"):
                        module.register_forward_hook(inner(index, name))
                last = mixer.out_proj if hasattr(mixer, "out_proj") else mixer.o_proj
                last.register_forward_hook(before(index, "mixed"))
                if hasattr(mixer, "norm"):
                    mixer.norm.register_forward_hook(before(index, "core"))
                for name in ("gate_proj", "up_proj", "down_proj"):
                    getattr(layer.mlp, name).register_forward_hook(inner(index, name))
                layer.post_attention_layernorm.register_forward_hook(inner(index, "post_norm"))
                layer.input_layernorm.register_forward_hook(inner(index, "input_norm"))

    # ---- States

    def states(self, wanted):
        """Computes the states that are not kept; `wanted` are tuples of ids."""
        fresh = [state for state in dict.fromkeys(wanted) if state not in self.kept]
        short = [state for state in fresh if self.bucketed and bucket(len(state)) <= GRAPH_TOKENS]
        for group in grouped([len(state) for state in short], lambda _members, _longest: STATES_A_PASS):
            self.padded_states([short[index] for index in group])
        for state in fresh:
            if state not in self.kept:
                self.plain_state(state)

    def plain_state(self, state):
        past = DynamicCache(config=self.config)
        ids = torch.tensor([state], device=self.device)
        positions = torch.arange(len(state), device=self.device)[None]
        self.run("state", ids, positions, None, None, past)
        self.keep([state], past)

    def padded_states(self, states):
        length, count = bucket(max(map(len, states))), count_bucket(len(states))
        ids = torch.zeros(count, length, dtype=torch.long)
        real = torch.zeros(count, length, dtype=torch.bool)
        for index, state in enumerate(states):
            ids[index, length - len(state) :] = torch.tensor(state)
            real[index, length - len(state) :] = True
        places = torch.arange(length)
        first = (~real).sum(1)
        positions = (places[None] - first[:, None]).clamp(min=0)
        causal = places[:, None] >= places[None]
        seen = (causal[None] & real[:, None, :]) | torch.eye(length, dtype=torch.bool)[None]
        past = DynamicCache(config=self.config)
        real = real.to(self.device)
        self.run("states", ids.to(self.device), positions.to(self.device), self.additive(seen), real, past)
        self.keep(states, past)

    def additive(self, seen):
        mask = torch.zeros(seen.shape, dtype=self.dtype, device=self.device)
        return mask.masked_fill_(~seen.to(self.device), torch.finfo(self.dtype).min)[:, None]

    def keep(self, states, past):
        for index, state in enumerate(states):
            tensors = []
            for kind, layer in zip(self.kinds, past.layers):
                if kind == "linear_attention":
                    pair = (layer.conv_states[0][index], layer.recurrent_states[0][index])
                else:
                    pair = (layer.keys[index, :, -len(state) :], layer.values[index, :, -len(state) :])
                tensors.append(tuple(tensor.clone() for tensor in pair))
            self.kept[state] = tensors

    def forget(self):
        """What the service's prefix cache gives up: the oldest states beyond 4, or beyond 65,536 tokens."""
        while len(self.kept) > CACHED_STATES or sum(map(len, self.kept)) > CACHED_TOKENS:
            self.kept.pop(next(iter(self.kept)))

    # ---- Rows

    def rows(self, rows):
        """Pointer logits of rows {"state", "ids", "decide", "ends"}, in order."""
        logits = [None] * len(rows)
        padded = [
            index for index, row in enumerate(rows)
            if self.bucketed and bucket(len(row["ids"])) <= GRAPH_TOKENS and len(row["state"]) <= BANK_TOKENS
        ]

        def most(members, longest):
            keys = bank(max(len(rows[padded[member]]["state"]) for member in members)) + longest
            return min(ROWS_A_PASS, TOKENS_A_PASS // keys)

        for group in grouped([len(rows[index]["ids"]) for index in padded], most):
            members = [padded[index] for index in group]
            for index, value in zip(members, self.padded_rows([rows[index] for index in members])):
                logits[index] = value
        by_state = {}
        for index, row in enumerate(rows):
            if logits[index] is None:
                by_state.setdefault(row["state"], []).append(index)
        for state, members in by_state.items():
            longest = max(len(rows[index]["ids"]) for index in members)
            step = max(1, EAGER_TOKENS // (len(state) + longest))
            for start in range(0, len(members), step):
                part = members[start : start + step]
                for index, value in zip(part, self.plain_rows(state, [rows[index] for index in part])):
                    logits[index] = value
        return logits

    def past_of(self, states, width):
        """A cache of these states, keys and values right-aligned in `width` places."""
        past = DynamicCache(config=self.config)
        for index, kind in enumerate(self.kinds):
            tensors = [self.kept[state][index] for state in states]
            if kind == "linear_attention":
                past.update_conv_state(torch.stack([pair[0] for pair in tensors]), index, conv_kernel_size=self.width)
                past.update_recurrent_state(torch.stack([pair[1] for pair in tensors]), index)
                continue
            sides = []
            for side in (0, 1):
                heads, _, dimension = tensors[0][side].shape
                out = tensors[0][side].new_zeros(len(states), heads, width, dimension)
                for place, pair in enumerate(tensors):
                    out[place, :, width - pair[side].shape[1] :] = pair[side]
                sides.append(out)
            past.update(*sides, index)
        return past

    def padded_rows(self, rows):
        length, count = bucket(max(len(row["ids"]) for row in rows)), count_bucket(len(rows))
        width = bank(max(len(row["state"]) for row in rows))
        # What fills the pass up repeats its first row; its outputs are dropped.
        filled = rows + [rows[0]] * (count - len(rows))
        ids = torch.zeros(count, length, dtype=torch.long)
        positions = torch.zeros(count, length, dtype=torch.long)
        seen = torch.zeros(count, length, width + length, dtype=torch.bool)
        places = torch.arange(length)
        for index, row in enumerate(filled):
            ids[index, : len(row["ids"])] = torch.tensor(row["ids"])
            positions[index] = len(row["state"]) + places
            seen[index, :, width - len(row["state"]) : width] = True
        seen[:, :, width:] = (places[:, None] >= places[None])[None]
        past = self.past_of([row["state"] for row in filled], width)
        hidden = self.run(
            "rows", ids.to(self.device), positions.to(self.device), self.additive(seen), None, past
        )
        return self.read(hidden, rows)

    def plain_rows(self, state, rows):
        length = max(len(row["ids"]) for row in rows)
        ids = torch.zeros(len(rows), length, dtype=torch.long)
        seen = torch.zeros(len(rows), length, len(state) + length, dtype=torch.bool)
        places = torch.arange(length)
        seen[:, :, : len(state)] = True
        seen[:, :, len(state) :] = (places[:, None] >= places[None])[None]
        for index, row in enumerate(rows):
            ids[index, : len(row["ids"])] = torch.tensor(row["ids"])
        positions = (len(state) + places)[None].expand(len(rows), -1)
        past = self.past_of([state] * len(rows), len(state))
        hidden = self.run(
            "plain-rows", ids.to(self.device), positions.to(self.device), self.additive(seen), None, past
        )
        return self.read(hidden, rows)

    def read(self, hidden, rows):
        head, logits = self.head, []
        for index, row in enumerate(rows):
            h = hidden[index].float()
            query = h[row["decide"]] @ head["q.weight"].T + head["q.bias"]
            keys = h[row["ends"]] @ head["k.weight"].T + head["k.bias"]
            logits.append((keys @ query) / math.sqrt(query.numel()))
        return logits

    # ---- Requests

    @torch.inference_mode()
    def answer(self, records):
        """Logits of every question of requests that wait together."""
        rows = [
            {"state": tuple(record["state"]["ids"]), "ids": question["ids"], "decide": question["decide"],
             "ends": question["option_ends"]}
            for record in records for question in record["questions"]
        ]
        self.states([row["state"] for row in rows])
        logits = self.rows(rows)
        for row in rows:
            self.kept[row["state"]] = self.kept.pop(row["state"])
        self.forget()
        return logits


def load(args):
    backbone, head, temperature = capture.load_model(args.checkpoint, torch.bfloat16, args.device)
    return Service(backbone, head, args.device, args.form), temperature


def run_capture(args):
    service, temperature = load(args)
    tokenizer = capture.AutoTokenizer.from_pretrained(args.checkpoint / "base")
    cases = list(capture.read_cases(args.corpus, args.tokens))
    answered = [(name, record) for name, _, record, _ in cases if "error" not in record]
    for _, record in answered:
        capture.check_tokens(tokenizer, record)
    outputs = {}
    for start in range(0, len(answered), args.together):
        wave = answered[start : start + args.together]
        logits = iter(service.answer([record for _, record in wave]))
        for name, record in wave:
            for question in record["questions"]:
                value = next(logits).float().cpu()
                outputs[(name, question["id"])] = (value, torch.softmax(value / temperature, 0))
    more = {
        "producer": f"transformers, the service's passes, {args.form}, {args.together} requests together",
        "profile": "service bfloat16",
        "batch": args.together,
    }
    capture.write_capture(args, tokenizer, cases, outputs, temperature, more)


@torch.inference_mode()
def run_trace(args):
    service, _ = load(args)
    record = next(
        record for record in map(capture.json.loads, pathlib.Path(args.tokens).read_text().splitlines())
        if record["name"] == args.case
    )
    service.watch(args.inside)
    logits = service.answer([record])
    tensors = {name: value.contiguous().cpu() for name, value in service.trace.items()}
    tensors["logits"] = torch.cat([value.float().cpu() for value in logits])
    save_file(tensors, args.out)
    print(f"{len(tensors)} tensors of {len(service.passes)} passes -> {args.out}")


@torch.inference_mode()
def run_kernels(args):
    from torch.profiler import ProfilerActivity, profile

    service, _ = load(args)
    state = tuple(range(100, 190))
    row = {"state": state, "ids": list(range(40)), "decide": 39, "ends": [20, 30]}
    long_state = tuple(range(100, 1400))
    for name, run in [
        ("state pass of 90 tokens", lambda: (service.kept.clear(), service.states([state]))),
        ("row pass of 6 rows of 40 tokens", lambda: service.rows([row] * 6)),
        ("state of 1,300 tokens, not padded", lambda: (service.states([long_state]),)),
    ]:
        run()
        torch.cuda.synchronize()
        with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as found:
            run()
            torch.cuda.synchronize()
        print(f"== {name}")
        events = [event for event in found.events() if event.device_type == torch.autograd.DeviceType.CUDA]
        counts = {}
        for event in sorted(events, key=lambda event: event.time_range.start):
            counts.setdefault(event.name, [0, 0.0])
            counts[event.name][0] += 1
            counts[event.name][1] += event.time_range.elapsed_us()
        for kernel, (count, time) in counts.items():
            print(f"{count:5} {time:9.1f} us  {kernel[:230]}")


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("command", choices=["capture", "trace", "kernels"])
    parser.add_argument("--checkpoint", type=pathlib.Path, required=True)
    parser.add_argument("--export", type=pathlib.Path, help="the export whose manifest the capture names")
    parser.add_argument("--corpus")
    parser.add_argument("--tokens", help="what `omni-kev tokens --corpus` printed")
    parser.add_argument("--case", help="the request that `trace` runs")
    parser.add_argument("--inside", type=int, help="a layer of which `trace` keeps every operation")
    parser.add_argument("--out")
    parser.add_argument("--form", choices=["bucketed", "eager"], default="bucketed")
    parser.add_argument("--together", type=int, default=1, help="requests that wait together, at most 64")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    args = parser.parse_args()
    if not 1 <= args.together <= 64:
        sys.exit(f"--together {args.together}: expected 1 to 64")
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    {"capture": run_capture, "trace": run_trace, "kernels": run_kernels}[args.command](args)


if __name__ == "__main__":
    main()
