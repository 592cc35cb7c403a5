/* norm_avx512.c - the norms and the sums around them; the plan is in norm_body.h. */
#define ISA(name) name##_avx512

#include "kernels/cpu/tuned.h"
#include "kernels/cpu/vec.h"

#include "kernels/cpu/norm_body.h"
