"""headrace: storage over NVMe-oF under multi-node LLM training."""
