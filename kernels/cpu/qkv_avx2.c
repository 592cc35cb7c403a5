/* qkv_avx2.c - head norms, rotation and the writing of KV; the plan is in qkv_body.h. */
#define ISA(name) name##_avx2

#include "kernels/cpu/kv.h"
#include "kernels/cpu/scratch.h"
#include "kernels/cpu/tuned.h"
#include "kernels/cpu/vec.h"

#include "kernels/cpu/qkv_body.h"
