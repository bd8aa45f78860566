#!/usr/bin/env python3
"""Compares every operation of profile `service` with torch, bit for bit, on this machine's GPU, and prints a table.

    operators.py --kernels omni-kev.fatbin [--probe FATBIN]

Inputs are random, shapes those of a 4B model. torch runs what transformers' module runs; ours are the kernels that the
worker loads, and, for products and triangular solves, the calls that it makes of the same cuBLAS. Exit code 1 when an
operation that is claimed to be equal is not.
"""

import argparse
import ctypes
import sys

import torch
import torch.nn.functional as F
from transformers.models.qwen3_5 import modeling_qwen3_5 as qwen

DEVICE = "cuda"
HIDDEN, INNER, HEADS, KV_HEADS, DIM, ROTARY = 2560, 9216, 16, 4, 256, 64
KEY_HEADS, VALUE_HEADS, CHANNELS = 16, 32, 8192
EPS = 1e-6
SHAPES = [(1, 96), (2, 48), (3, 144), (6, 80), (1, 320)]


class Kernels:
    """Kernels of a fatbin on torch's current stream."""

    def __init__(self, path):
        torch.zeros(1, device=DEVICE)
        self.driver = ctypes.CDLL("libcuda.so.1")
        self.module = ctypes.c_void_p()
        image = open(path, "rb").read() + b"\0"
        self.check(self.driver.cuModuleLoadData(ctypes.byref(self.module), image))

    def check(self, code):
        if code:
            sys.exit(f"the driver answered {code}")

    def __call__(self, name, grid, threads, *arguments):
        function = ctypes.c_void_p()
        self.check(self.driver.cuModuleGetFunction(ctypes.byref(function), self.module, name.encode()))
        slots = []
        for value in arguments:
            if value is None:
                slots.append(ctypes.c_void_p(0))
            elif torch.is_tensor(value):
                slots.append(ctypes.c_void_p(value.data_ptr()))
            elif isinstance(value, float):
                slots.append(ctypes.c_float(value))
            else:
                slots.append(ctypes.c_int(value))
        pointers = (ctypes.c_void_p * len(slots))(*[ctypes.addressof(slot) for slot in slots])
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        x, y, z = (*grid, 1, 1)[:3]
        self.check(self.driver.cuLaunchKernel(function, x, y, z, threads, 1, 1, 0, stream, pointers, None))


def bf16(*shape, scale=1.0):
    return (torch.randn(*shape, device=DEVICE) * scale).bfloat16()


def up(n, m):
    return -(-n // m)


class Table:
    def __init__(self):
        self.rows, self.failed = {}, False

    def compare(self, operation, ours, theirs, claimed=True):
        assert ours.shape == theirs.shape and ours.dtype == theirs.dtype, (operation, ours.shape, theirs.shape)
        integer = torch.int16 if ours.dtype == torch.bfloat16 else torch.int32
        # Zeros of both signs are one value.
        different = (ours.contiguous().view(integer) != theirs.contiguous().view(integer)) & ~((ours == 0) & (theirs == 0))
        rms = theirs.double().pow(2).mean().sqrt().item() or 1.0
        worst = ((ours.double() - theirs.double()).abs().max().item()) / rms
        row = self.rows.setdefault(operation, {"shapes": 0, "elements": 0, "different": 0, "worst": 0.0, "claimed": claimed})
        row["shapes"] += 1
        row["elements"] += ours.numel()
        row["different"] += int(different.sum())
        row["worst"] = max(row["worst"], worst)
        if claimed and row["different"]:
            self.failed = True

    def show(self):
        print(f"{'operation':44} {'shapes':>6} {'elements':>12} {'different':>10} {'worst / rms':>12}")
        for name, row in self.rows.items():
            verdict = "" if row["different"] == 0 else ("  DIFFERENT" if row["claimed"] else "  listed")
            print(
                f"{name:44} {row['shapes']:6} {row['elements']:12} {row['different']:10} {row['worst']:12.2e}{verdict}"
            )


def norms(k, table, batch, length):
    rows = batch * length
    norm = qwen.Qwen3_5RMSNorm(HIDDEN, EPS).to(DEVICE, torch.bfloat16)
    norm.weight.data = bf16(HIDDEN, scale=0.2)
    x, delta = bf16(rows, HIDDEN, scale=3.0), bf16(rows, HIDDEN)
    residual, out = x.clone(), torch.empty_like(x)
    k("service_add_rms_norm", (up(rows, 8),), 256, residual, delta, norm.weight.data, out, None, EPS, rows, HIDDEN, length)
    table.compare("residual add", residual, x + delta)
    table.compare("RMSNorm", out, norm(x + delta))


def embedding(k, table, batch, length):
    rows = batch * length
    weight = bf16(5000, HIDDEN)
    ids = torch.randint(0, 5000, (rows,), device=DEVICE)
    out = torch.empty(rows, HIDDEN, device=DEVICE, dtype=torch.bfloat16)
    k("gather_hh", (rows,), 256, weight, ids.int(), out, HIDDEN)
    table.compare("embedding", out, F.embedding(ids, weight))


def convolution(k, table, batch, length):
    weight = bf16(CHANNELS, 4, scale=0.5)
    u = bf16(batch, length, CHANNELS)
    history = bf16(batch, 3, CHANNELS)
    for name, past in [("convolution and silu, from nothing", None), ("convolution and silu, from a state", history)]:
        out = torch.empty_like(u)
        k("service_conv", (length, up(CHANNELS, 256), batch), 256, u, weight, past, out, length, CHANNELS)
        mixed = u.transpose(1, 2)
        if past is not None:
            kept = torch.cat([torch.zeros_like(past[:, :1]), past], 1).transpose(1, 2).contiguous()
            mixed = torch.cat([kept, mixed], dim=-1)
        theirs = qwen.causal_conv1d_fn(mixed, weight, None, activation="silu")[:, :, -length:].transpose(1, 2)
        table.compare(name, out, theirs)


def gates(k, table, batch, length):
    rows = batch * length
    b, a = bf16(rows, VALUE_HEADS, scale=2.0), bf16(rows, VALUE_HEADS, scale=8.0)
    a_log = (0.02 + 0.5 * torch.rand(VALUE_HEADS, device=DEVICE)).log().bfloat16()
    bias = bf16(VALUE_HEADS) - 1
    beta = torch.empty(rows, VALUE_HEADS, device=DEVICE)
    decay = torch.empty_like(beta)
    count = rows * VALUE_HEADS
    k("service_gates", (up(count, 256),), 256, b, a, a_log, bias, beta, decay, count, VALUE_HEADS)
    table.compare("beta", beta, b.sigmoid().float())
    table.compare("decay", decay, -a_log.float().exp() * F.softplus(a.float() + bias))


class Cublas:
    """The calls that the worker makes of the cuBLAS that torch has loaded."""

    def __init__(self):
        torch.mm(bf16(16, 16), bf16(16, 16))
        self.library = ctypes.CDLL("libcublas.so.13")
        self.handle = ctypes.c_void_p()
        self.check(self.library.cublasCreate_v2(ctypes.byref(self.handle)))
        stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
        self.check(self.library.cublasSetStream_v2(self.handle, stream))
        self.workspace = torch.empty(32 << 20, dtype=torch.uint8, device=DEVICE)
        self.check(self.library.cublasSetWorkspace_v2(self.handle, ctypes.c_void_p(self.workspace.data_ptr()), ctypes.c_size_t(32 << 20)))
        self.check(self.library.cublasSetMathMode(self.handle, 0))

    def check(self, code):
        if code:
            sys.exit(f"cuBLAS answered {code}")

    def linear(self, x, weight, out):
        """out = x weight^T, BF16, as `at::cuda::blas::gemm` asks for it."""
        one, zero = ctypes.c_float(1), ctypes.c_float(0)
        rows, depth, columns = x.shape[0], x.shape[1], weight.shape[0]
        bf, f32, tensor_op = 14, 68, 99
        self.check(self.library.cublasGemmEx(
            self.handle, 1, 0, columns, rows, depth, ctypes.byref(one), ctypes.c_void_p(weight.data_ptr()), bf, depth,
            ctypes.c_void_p(x.data_ptr()), bf, depth, ctypes.byref(zero), ctypes.c_void_p(out.data_ptr()), bf, columns,
            f32, tensor_op))

    def batched(self, a_transposed, b_transposed, m, n, depth, a, lda, stride_a, b, ldb, stride_b, c, ldc, stride_c, count):
        one, zero, wide = ctypes.c_float(1), ctypes.c_float(0), ctypes.c_longlong
        self.check(self.library.cublasSgemmStridedBatched(
            self.handle, a_transposed, b_transposed, m, n, depth, ctypes.byref(one), ctypes.c_void_p(a), lda,
            wide(stride_a), ctypes.c_void_p(b), ldb, wide(stride_b), ctypes.byref(zero), ctypes.c_void_p(c), ldc,
            wide(stride_c), count))

    def solve(self, a_pointers, b_pointers, count):
        """Lower triangular with unit diagonal, row-major; 128 right-hand sides, column-major."""
        one = ctypes.c_float(1)
        self.check(self.library.cublasStrsmBatched(
            self.handle, 0, 1, 1, 1, 64, 128, ctypes.byref(one), ctypes.c_void_p(a_pointers.data_ptr()), 64,
            ctypes.c_void_p(b_pointers.data_ptr()), 64, count))


def products(_k, table, cublas, batch, length):
    rows = batch * length
    for name, columns, depth in [
        ("product qkv", CHANNELS, HIDDEN), ("product z", 4096, HIDDEN), ("product b, a", VALUE_HEADS, HIDDEN),
        ("product out, o", HIDDEN, 4096), ("product k, v", 1024, HIDDEN), ("product gate, up", INNER, HIDDEN),
        ("product down", HIDDEN, INNER),
    ]:
        weight, x = bf16(columns, depth, scale=depth**-0.5), bf16(batch, length, depth)
        out = torch.empty(rows, columns, device=DEVICE, dtype=torch.bfloat16)
        cublas.linear(x.view(rows, depth), weight, out)
        table.compare(name, out, F.linear(x, weight).view(rows, columns))


def delta_rule(k, table, cublas, batch, length, with_state):
    heads = VALUE_HEADS
    mixed = bf16(batch, length, CHANNELS)
    beta = torch.rand(batch, length, heads, device=DEVICE).bfloat16()
    decay = -torch.rand(batch, length, heads, device=DEVICE) * 0.5
    state = torch.randn(batch, heads, 128, 128, device=DEVICE) * 0.1 if with_state else None
    # transformers
    query, key, value = torch.split(mixed, [2048, 2048, 4096], dim=-1)
    query = query.reshape(batch, length, -1, 128).repeat_interleave(2, dim=2)
    key = key.reshape(batch, length, -1, 128).repeat_interleave(2, dim=2)
    value = value.reshape(batch, length, -1, 128)
    theirs, their_state = qwen.torch_chunk_gated_delta_rule(
        query, key, value, g=decay, beta=beta, initial_state=None if state is None else state.clone(),
        output_final_state=True, use_qk_l2norm_in_kernel=True,
    )
    ours, our_state = native_delta_rule(k, cublas, mixed, beta.float(), decay, state)
    name = "delta rule, from a state" if with_state else "delta rule, from nothing"
    table.compare(name, ours, theirs.reshape(batch, length, heads, 128))
    table.compare(name + ": final state", our_state, their_state)


def native_delta_rule(k, cublas, mixed, beta, decay, state):
    batch, length, _ = mixed.shape
    heads = VALUE_HEADS
    chunks = up(length, 64)
    padded, count = chunks * 64, batch * heads * chunks
    new = lambda *shape: torch.empty(*shape, device=DEVICE)
    q, key, kb = (new(batch, heads, padded, 128) for _ in range(3))
    vb, kbd = (new(batch, heads, chunks, 128, 64) for _ in range(2))
    k("service_delta_prepare", (up(padded, 8), KEY_HEADS, batch), 256, mixed, beta, q, key, kb, vb, length, padded,
      KEY_HEADS, heads)
    sums = new(batch, heads, padded)
    threads = 32 if count <= 32 else 16
    k("service_delta_sums", (chunks, heads, batch), 32, decay, sums, length, padded, heads, threads)
    solve, within = new(count, 64, 64), new(count, 64, 64)
    for left, out in ((kb, solve), (q, within)):
        cublas.batched(1, 0, 64, 64, 128, key.data_ptr(), 128, 8192, left.data_ptr(), 128, 8192, out.data_ptr(), 64, 4096,
                       count)
    k("service_delta_decay", (count,), 256, sums, solve, within, q, key, kb, kbd)
    pointers = {}
    for name, tensor, step in (("a", solve, 4096), ("v", vb, 8192), ("k", kbd, 8192)):
        pointers[name] = (torch.arange(count, device=DEVICE) * (step * 4) + tensor.data_ptr()).contiguous()
    cublas.solve(pointers["a"], pointers["v"], count)
    cublas.solve(pointers["a"], pointers["k"], count)
    many = batch * heads
    s = torch.zeros(batch, heads, 128, 128, device=DEVICE) if state is None else state.clone()
    predicted, fresh, across, inside = (new(many, 64, 128) for _ in range(4))
    update = new(many, 128, 128)
    out = torch.empty(batch, length, heads, 128, device=DEVICE, dtype=torch.bfloat16)
    for chunk in range(chunks):
        at = lambda tensor, size: tensor.data_ptr() + chunk * size * 4
        cublas.batched(0, 1, 128, 64, 128, s.data_ptr(), 128, 16384, at(kbd, 8192), 64, chunks * 8192,
                       predicted.data_ptr(), 128, 8192, many)
        k("service_delta_fresh", (many,), 256, vb, predicted, fresh, chunk, chunks)
        cublas.batched(0, 0, 128, 64, 128, s.data_ptr(), 128, 16384, at(q, 8192), 128, chunks * 8192, across.data_ptr(),
                       128, 8192, many)
        cublas.batched(0, 0, 128, 64, 64, fresh.data_ptr(), 128, 8192, at(within, 4096), 64, chunks * 4096,
                       inside.data_ptr(), 128, 8192, many)
        cublas.batched(0, 1, 128, 128, 64, fresh.data_ptr(), 128, 8192, at(key, 8192), 128, chunks * 8192,
                       update.data_ptr(), 128, 16384, many)
        k("service_delta_step", (many,), 256, across, inside, update, sums, s, out, chunk, padded, length, heads)
    return out, s


def gated_norm(k, table, batch, length):
    count = batch * length * VALUE_HEADS
    norm = qwen.Qwen3_5RMSNormGated(128, EPS).to(DEVICE, torch.bfloat16)
    norm.weight.data = 1 + bf16(128, scale=0.2)
    o, z = bf16(count, 128, scale=0.3), bf16(count, 128)
    out = o.clone()
    k("service_gated_norm", (up(count, 8),), 256, out, z, norm.weight.data, EPS, count)
    table.compare("gated RMSNorm", out, norm(o, z))


def heads(k, table, batch, length):
    projected = bf16(batch, length, HEADS * 2 * DIM)
    keys = bf16(batch, length, KV_HEADS * DIM)
    inverse = (1.0 / (1e7 ** (torch.arange(0, ROTARY, 2, dtype=torch.float) / ROTARY))).bfloat16().float().to(DEVICE)
    positions = torch.randint(0, 4000, (batch, 1), device=DEVICE) + torch.arange(length, device=DEVICE)[None]
    angles = (inverse[None, :, None].expand(batch, -1, 1) @ positions[:, None].float()).transpose(1, 2)
    angles = torch.cat([angles, angles], -1)
    cos, sin = angles.cos().bfloat16(), angles.sin().bfloat16()
    query_norm, key_norm = (qwen.Qwen3_5RMSNorm(DIM, EPS).to(DEVICE, torch.bfloat16) for _ in range(2))
    for norm in (query_norm, key_norm):
        norm.weight.data = bf16(DIM, scale=0.2)
    query, _ = torch.chunk(projected.view(batch, length, -1, 2 * DIM), 2, dim=-1)
    query = query_norm(query.view(batch, length, HEADS, DIM)).transpose(1, 2)
    key = key_norm(keys.view(batch, length, KV_HEADS, DIM)).transpose(1, 2)
    query, key = qwen.apply_rotary_pos_emb(query, key, cos, sin)
    places = positions.int().contiguous()
    for name, source, norm, count, row, stride, theirs in (
        ("query norm and rotation", projected, query_norm, HEADS, HEADS * 2 * DIM, 2 * DIM, query),
        ("key norm and rotation", keys, key_norm, KV_HEADS, KV_HEADS * DIM, DIM, key),
    ):
        out = torch.empty(batch, count, length, DIM, device=DEVICE, dtype=torch.bfloat16)
        k("service_heads", (up(length, 8), count, batch), 256, source, norm.weight.data, inverse, places, out, EPS, row,
          stride, length, DIM, ROTARY, length, 0)
        table.compare(name, out, theirs)


def elementwise(k, table, batch, length):
    rows = batch * length
    gate, up_ = bf16(rows, INNER), bf16(rows, INNER)
    out = torch.empty_like(gate)
    count = rows * INNER
    k("service_swiglu", (up(count // 4, 256),), 256, gate, up_, out, count)
    table.compare("silu times up", out, F.silu(gate) * up_)
    projected, attended = bf16(rows, HEADS * 2 * DIM), bf16(rows, HEADS * DIM)
    gate = torch.chunk(projected.view(rows, HEADS, 2 * DIM), 2, dim=-1)[1].reshape(rows, -1)
    out = attended.clone()
    k("service_output_gate", (rows,), 256, out, projected, HEADS, DIM)
    table.compare("output gate", out, attended * torch.sigmoid(gate))


def attention_inputs(batch, length, states):
    """Queries, keys, values and the additive mask of a state pass (`states` None: padded on the left) or a row pass."""
    if states is None:
        keys, own = length, 0
        hidden = torch.randint(0, 16, (batch,), device=DEVICE)
    else:
        bank = 1 << (max(16, max(states)) - 1).bit_length()
        keys, own = bank + length, bank
        hidden = bank - torch.tensor(states, device=DEVICE)
    query = bf16(batch, HEADS, length, DIM)
    key, value = bf16(batch, KV_HEADS, keys, DIM), bf16(batch, KV_HEADS, keys, DIM)
    j, i = torch.arange(keys, device=DEVICE)[None, None], torch.arange(length, device=DEVICE)[None, :, None]
    seen = ((j >= hidden[:, None, None]) & (j <= own + i)) | (j == own + i)
    mask = torch.zeros(batch, length, keys, device=DEVICE, dtype=torch.bfloat16)
    mask.masked_fill_(~seen, torch.finfo(torch.bfloat16).min)
    return query, key, value, mask[:, None], hidden.int(), keys, own


def attend(query, key, value, mask):
    groups = HEADS // KV_HEADS
    key, value = qwen.repeat_kv(key, groups), qwen.repeat_kv(value, groups)
    return F.scaled_dot_product_attention(query, key, value, attn_mask=mask, scale=DIM**-0.5).transpose(1, 2).contiguous()


ATTENTION_CASES = [(1, 96, None), (2, 64, None), (1, 320, None), (2, 32, [20, 30]), (6, 48, [90] * 6), (3, 80, [300, 40, 520]),
                   (1, 160, [900])]


def attention(k, table, case, names=("service_attention",)):
    batch, length, states = case
    query, key, value, mask, hidden, keys, own = attention_inputs(batch, length, states)
    theirs = attend(query, key, value, mask)
    for name in names:
        out = torch.empty(batch, length, HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
        k(name, (up(length, 64), HEADS, batch), 128, query, key, value, hidden, out, length, keys, own, HEADS, KV_HEADS)
        label = "attention" if name == "service_attention" else name
        kind = ("one tile" if keys <= 128 else "several tiles of keys")
        table.compare(f"{label}, {kind}", out, theirs, claimed=name == "service_attention")


def causal(k, table, length):
    """Without padding there is no mask: torch takes grouped heads and a causal kernel."""
    query = bf16(1, HEADS, length, DIM)
    key, value = bf16(1, KV_HEADS, length, DIM), bf16(1, KV_HEADS, length, DIM)
    theirs = F.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True, scale=DIM**-0.5)
    out = torch.empty(1, length, HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
    hidden = torch.zeros(1, device=DEVICE, dtype=torch.int32)
    k("service_attention", (up(length, 64), HEADS, 1), 128, query, key, value, hidden, out, length, length, 0, HEADS,
      KV_HEADS)
    # Not claimed: the kernel that torch takes here is another one.
    table.compare("attention, causal, not padded", out, theirs.transpose(1, 2), claimed=False)


@torch.inference_mode()
def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kernels", required=True)
    parser.add_argument("--probe", help="a fatbin of attention kernels that sum in other orders")
    args = parser.parse_args()
    torch.manual_seed(0)
    torch.backends.cuda.matmul.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    k, cublas, table = Kernels(args.kernels), Cublas(), Table()
    for shape in SHAPES:
        embedding(k, table, *shape)
        norms(k, table, *shape)
        products(k, table, cublas, *shape)
        convolution(k, table, *shape)
        gates(k, table, *shape)
        gated_norm(k, table, *shape)
        heads(k, table, *shape)
        elementwise(k, table, *shape)
    for shape in SHAPES + [(1, 64), (1, 16), (16, 112)]:
        delta_rule(k, table, cublas, *shape, False)
        delta_rule(k, table, cublas, *shape, True)
    for case in ATTENTION_CASES:
        attention(k, table, case)
    for length in (100, 1000, 1300):
        causal(k, table, length)
    table.show()
    if args.probe:
        probe, other = Kernels(args.probe), Table()
        names = [f"probe_{o}_{j}_{f}" for o in range(8) for j in range(2) for f in range(3)]
        for case in ATTENTION_CASES:
            attention(probe, other, case, names)
        other.rows = dict(sorted(other.rows.items(), key=lambda item: (item[0].split(", ")[1], item[1]["different"])))
        other.show()
    sys.exit(1 if table.failed else 0)


if __name__ == "__main__":
    main()
