/* route_avx512.c - the router's choice; the plan is in route_body.h. */
#define ISA(name) name##_avx512

#include "kernels/cpu/tuned.h"
#include "kernels/cpu/vec.h"

#include "kernels/cpu/route_body.h"
