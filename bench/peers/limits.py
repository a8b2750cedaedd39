"""Limits that are the same for every contender. All environments read this: it imports nothing."""

MODEL = "bench"  # as servers name it
MAX_MODEL_LEN, MAX_SEQS = 2048, 32
CACHE_NBYTES = 512 << 20
ENGINE = {  # of vLLM's
    "dtype": "bfloat16",
    "max_model_len": MAX_MODEL_LEN,
    "max_num_seqs": MAX_SEQS,
    "kv_cache_memory_bytes": CACHE_NBYTES,
}
FLAGS = " ".join(f"--{name.replace('_', '-')} {value}" for name, value in ENGINE.items())
AUTO_FLAGS = FLAGS.replace("--dtype bfloat16", "--dtype auto")  # what the machine multiplies well
