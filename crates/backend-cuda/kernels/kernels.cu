// The one translation unit: every family, so that all kernels are one module and one fatbin.
#include "attention.cu"
#include "attention_mma.cu"
#include "conv.cu"
#include "delta_prepare.cu"
#include "delta_rule.cu"
#include "delta_scan.cu"
#include "embedding.cu"
#include "gemm.cu"
#include "merge.cu"
#include "norms.cu"
#include "pointer_head.cu"
#include "query_key_value.cu"
#include "service.cu"
#include "service_attention.cu"
#include "swiglu.cu"
#include "tuning.cu"

// The binary asks for this name, so that kernels of another version are refused instead of misread.
// Raise the number with every change of a kernel's parameters; `module.rs` holds the same number.
extern "C" __global__ void omni_kev_kernels_8() {}

// Fails asynchronously, as a broken device does: for the test of what happens then.
extern "C" __global__ void omni_kev_trap() { __trap(); }
