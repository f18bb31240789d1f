"""A vLLM server with tensor parallelism on two GPUs, suspended and resumed; see `python -m tests.gpu.vllm --help`."""
