"""transformers generate on CPU, distinct prompts (nothing to share). Environment: ROWS (128), LENGTH (128), NEW (64).

The model's end of turn is switched off, which is faster than `min_new_tokens` (no logits processor, no stop test).
"""

import json
import os
import time

import torch
import transformers
from toy import config
from transformers import LlamaForCausalLM

rows, length, new = int(os.getenv("ROWS", "128")), int(os.getenv("LENGTH", "128")), int(os.getenv("NEW", "64"))
torch.manual_seed(0)
model = LlamaForCausalLM(config(tie_word_embeddings=True)).eval()
model.generation_config.eos_token_id = None
warm = torch.randint(0, 2000, (2, length), generator=torch.Generator().manual_seed(2))
ids = torch.randint(0, 2000, (rows, length), generator=torch.Generator().manual_seed(1))
sampling = {"do_sample": True, "top_k": 0, "temperature": 1.0}
with torch.no_grad():
    model.generate(input_ids=warm, attention_mask=torch.ones_like(warm), max_new_tokens=2, **sampling)
    start = time.perf_counter()
    out = model.generate(input_ids=ids, attention_mask=torch.ones_like(ids), max_new_tokens=new, **sampling)
    took = time.perf_counter() - start
assert out.shape == (rows, length + new), out.shape
facts = {
    "peer": f"transformers {transformers.__version__} generate",
    "tokens_per_s": rows * new / took,
    "rows": rows,
    "length": length,
}
print(json.dumps({**facts, "new_tokens": new, "threads": torch.get_num_threads()}))
