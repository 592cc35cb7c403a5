#include "kernels/cpu/ref.h"

void
cpu_ops_ref(struct ns_backend_ops *ops)
{
    ops->embed = embed_ref;
    ops->gather = gather_ref;
    ops->scatter = scatter_ref;
    ops->rmsnorm = rmsnorm_ref;
    ops->add_norm = add_norm_ref;
    ops->add_then_norm = add_then_norm_ref;
    ops->branch_norms = branch_norms_ref;
    ops->layer_end = layer_end_ref;
    ops->linear = linear_ref;
    ops->gated = gated_ref;
    ops->qkv = qkv_ref;
    ops->attention = attention_ref;
    ops->route = route_ref;
    ops->experts = experts_ref;
    ops->head = head_ref;
    ops->patch_place = patch_place_ref;
    ops->patch_qkv = patch_qkv_ref;
    ops->patch_pool = patch_pool_ref;
    ops->clamp = clamp_ref;
    ops->gelu_times = gelu_times_ref;
    ops->logits = logits_ref;
}

size_t
ref_thread_scratch_bytes(const struct ns_backend_sizes *sizes)
{
    size_t attention = (size_t)sizes->head_dim * sizeof(double);
    size_t experts = (size_t)sizes->hidden *
                         (sizeof(double) + sizeof(float)) +
                     (size_t)sizes->expert_dim * 2 * sizeof(float);
    size_t head = (size_t)sizes->hidden * sizeof(double) +
                  (size_t)sizes->vocab * (sizeof(double) + sizeof(float) +
                                          sizeof(uint32_t) + sizeof(uint8_t));
    size_t most = attention > experts ? attention : experts;

    return most > head ? most : head;
}
