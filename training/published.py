"""transformers' own class on an exported checkpoint, in fp32: the peer that export.py and vectors.py compare with."""
import torch
from transformers import DiffusionGemmaForBlockDiffusion, DynamicCache

import pictures as P
import vision as V


def load(folder):
    """(model, what is missing or in excess). Embeddings are scaled by the bf16 number that the released weights would be."""
    model, info = DiffusionGemmaForBlockDiffusion.from_pretrained(folder, dtype=torch.float32, attn_implementation="eager",
                                                                  output_loading_info=True)
    scale = torch.tensor(model.config.get_text_config().hidden_size ** 0.5).bfloat16().float()
    for e in (model.model.decoder.embed_tokens, model.model.encoder.language_model.embed_tokens):
        e.embed_scale = scale.clone()
    return model.eval(), info


def picture_inputs(model, ids, number):
    """What the class's processor makes of a picture that needs no resizing."""
    values, places = V.patches(torch.from_numpy(P.pixels(P.picture(number)))[None], model.config.vision_config.patch_size)
    kinds = (torch.tensor([ids]) == model.config.image_token_id).long()
    return {"pixel_values": values, "image_position_ids": places[None], "mm_token_type_ids": kinds}


def encode(model, ids, number=None):
    """(last hidden states, cache) of a prompt in encoder mode, under the masks of the class's generate loop."""
    config = model.config.get_text_config()
    cache = DynamicCache(config=config)
    tokens = torch.tensor([ids])
    more = {} if number is None else picture_inputs(model, ids, number)
    kinds = more.pop("mm_token_type_ids", None)
    masks = model.model.encoder.create_masks_for_generate(
        config=model.config, inputs_embeds=torch.empty(1, len(ids), 0), attention_mask=torch.ones_like(tokens), past_key_values=cache,
        position_ids=torch.arange(len(ids))[None], mm_token_type_ids=kinds)
    out = model.model.encoder(input_ids=tokens, attention_mask=masks, past_key_values=cache, **more)
    return out.last_hidden_state, cache


def logits(model, hidden):
    cap = model.config.get_text_config().final_logit_softcapping
    return torch.tanh(hidden @ model.model.decoder.embed_tokens.weight.t() / cap) * cap


@torch.no_grad()
def greedy(model, ids, number, ends, longest):
    hidden, cache = encode(model, ids, number)
    out = []
    while len(out) < longest:
        token = int(logits(model, hidden[0, -1]).argmax())
        out.append(token)
        if token in ends:
            break
        seen = torch.ones(1, len(ids) + len(out), dtype=torch.long)
        hidden = model.model.encoder(input_ids=torch.tensor([[token]]), attention_mask=seen, past_key_values=cache).last_hidden_state
    return out
