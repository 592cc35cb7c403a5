/* route_avx2.c - the router's choice; the plan is in route_body.h. */
#define ISA(name) name##_avx2

#include "kernels/cpu/tuned.h"
#include "kernels/cpu/vec.h"

#include "kernels/cpu/route_body.h"
