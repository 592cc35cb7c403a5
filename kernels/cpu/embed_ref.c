/* embed_ref.c - rows by index: embedding, gather, scatter. */
#include "kernels/cpu/ref.h"

void
embed_ref(struct ns_backend *be, struct ns_rows y,
          const struct ns_weight *table, const int32_t *ids, float scale)
{
    (void)be;
    for (uint32_t i = 0; i < y.n_rows; i++) {
        const void *row = packed_table_row(table, (uint32_t)ids[i]);
        const float *as_float = row;
        const uint16_t *as_bf16 = row;
        float *to = row_of(y, i);

        for (uint32_t j = 0; j < y.n_cols; j++) {
            float e = table->dtype == NS_F32 ? as_float[j]
                                             : bf16_to_float(as_bf16[j]);

            to[j] = e * scale;
        }
    }
}

void
gather_ref(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
           const uint32_t *index)
{
    (void)be;
    for (uint32_t i = 0; i < y.n_rows; i++)
        memcpy(row_of(y, i), row_of(x, index[i]), x.n_cols * sizeof(float));
}

void
scatter_ref(struct ns_backend *be, struct ns_rows y, struct ns_rows x,
            const uint32_t *index)
{
    (void)be;
    for (uint32_t i = 0; i < x.n_rows; i++)
        memcpy(row_of(y, index[i]), row_of(x, i), x.n_cols * sizeof(float));
}
