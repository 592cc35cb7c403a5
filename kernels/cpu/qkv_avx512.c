/* qkv_avx512.c - head norms, rotation and the writing of KV; the plan is in qkv_body.h. */
#define ISA(name) name##_avx512

#include "kernels/cpu/kv.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/tuned.h"
#include "kernels/cpu/vec.h"

#include "kernels/cpu/qkv_body.h"
