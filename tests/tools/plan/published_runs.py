"""Published throughput of engines at maximum load, and the roofline's predictions for it.

This file has the columns of the tables below that the formulas describe: with tensor parallelism
(no data parallel attention, no pipelines), and with weights that leave at least a tenth of the
memory to KV. Of a column it has all runs with 1,000 prompt tokens or more, except 1,024/1,024 if
there is 1,000/1,000. One run for each engine, format and GPU family was used to fit the share in
`efficiency.MATMUL`; the others were not.
"""

from __future__ import annotations

import msgspec

from disagg.capacity.efficiency import efficiency_of
from disagg.capacity.gpus import GPUS
from disagg.capacity.roofline import Placement
from disagg.capacity.shapes import SHAPES
from disagg.capacity.sizing import MAX_BATCH
from disagg.time_model import StepFeatures

_TRT = "https://github.com/NVIDIA/TensorRT-LLM/blob/"
_GPUSTACK = "https://docs.gpustack.ai/latest/performance-lab/"
SOURCES = {
    "trt-1.0": f"{_TRT}00f37686aa854010d68bcbd0f4ab000221541ca6/docs/source/performance/"
    "perf-overview.md (TensorRT-LLM 1.0, read 2026-11-23)",
    "trt-new": f"{_TRT}03e27c7d5ff0c6e89f8328838c0a8e64f1b34f9d/docs/source/developer-guide/"
    "perf-overview.md (TensorRT-LLM after 1.0, read 2026-11-23)",
    "14b-h100": f"{_GPUSTACK}qwen3-14b/h100 (2025-11-13)",
    "14b-a100": f"{_GPUSTACK}qwen3-14b/a100 (2025-11-13)",
    "32b-h100": f"{_GPUSTACK}qwen3-32b/h100 (2025-11-13)",
    "20b-h100": f"{_GPUSTACK}gpt-oss-20b/h100 (2025-11-04)",
    "120b-h100": f"{_GPUSTACK}gpt-oss-120b/h100 (2025-11-12)",
}


class Run(msgspec.Struct, frozen=True):
    """One published run.

    Attributes:
        num_in, num_out: mean prompt and output tokens of a request.
        tokens_per_s: throughput of all its GPUs in tokens of answers; if `is_total`, in tokens of
            prompts and answers.
        source: one of `SOURCES`.
        is_fitted: whether the engine's share in `efficiency.MATMUL` was chosen to meet it.
    """

    engine: str
    model: str
    gpu: str
    num_gpus: int
    weights: str
    kv: str
    num_in: int
    num_out: float
    tokens_per_s: float
    source: str
    is_total: bool = False
    is_fitted: bool = False

    @property
    def key(self) -> tuple[str, str, str]:
        """The run's key in `efficiency.MATMUL`."""
        weights = SHAPES[self.model].products_in(self.weights)
        return self.engine, weights, GPUS[self.gpu].family

    def placement(self) -> Placement:
        shape, gpu = SHAPES[self.model], GPUS[self.gpu]
        efficiency = efficiency_of(gpu, shape.products_in(self.weights), self.engine)
        return Placement(shape, gpu, self.num_gpus, self.weights, self.kv, efficiency)

    def predicted_tokens_per_s(self, worker: Placement | None = None) -> float:
        """The predicted `tokens_per_s` of `placement()`, or of another worker."""
        worker = worker or self.placement()
        made_per_s = saturated_tokens_per_s(worker, self.num_in, self.num_out)
        return made_per_s * ((self.num_in + self.num_out) / self.num_out if self.is_total else 1.0)


def saturated_tokens_per_s(worker: Placement, num_in: float, num_out: float) -> float:
    """Tokens/s of answers at maximum load.

    As many sequences decode as the memory holds. In each step every sequence gains a token, and
    enough prompt tokens are computed for new requests to replace those that end.
    """
    mean_tokens = num_in + num_out / 2
    batch = max(1, min(MAX_BATCH, int(worker.num_kv_tokens / mean_tokens)))
    num_new = batch * num_in / num_out
    step = StepFeatures(
        round(num_new), num_new * (num_in + 1) / 2, batch, round(batch * mean_tokens)
    )
    return batch / worker.step_s(step)


def _table(
    model: str,
    gpu: str,
    num_gpus: int,
    weights: str,
    tokens_per_s: dict[tuple[int, int], float],
    *,
    kv: str = "fp8",
    source: str = "trt-1.0",
    fitted: tuple[int, int] | None = None,
) -> list[Run]:
    """A column of TensorRT-LLM's tables: tokens/s of answers by (in, out)."""
    return [
        Run("tensorrt-llm", model, gpu, num_gpus, weights, kv, *lengths, figure, source,
            is_fitted=lengths == fitted)
        for lengths, figure in tokens_per_s.items()
    ]  # fmt: skip


def _total(
    engine: str, model: str, weights: str, source: str, *figures: tuple[int, float, float],
    num_gpus: int = 1, fitted: int = 0,
) -> list[Run]:  # fmt: skip
    """Runs of GPUStack: (in, out, total tokens/s). `out` is the mean number of generated tokens."""
    gpu = "a100-80gb" if source.endswith("a100") else "h100"
    return [
        Run(engine, model, gpu, num_gpus, weights, "bf16", num_in, num_out, figure, source, True,
            num_in == fitted)
        for num_in, num_out, figure in figures
    ]  # fmt: skip


RUNS = (
    *_table("llama-3.1-8b", "h100", 1, "fp8", fitted=(2048, 128), tokens_per_s={
        (1000, 1000): 15220, (1000, 2000): 13899, (2048, 128): 3450, (2048, 2048): 9305,
        (5000, 500): 3459, (20000, 2000): 1351}),
    *_table("llama-3.1-8b", "h200", 1, "fp8", {
        (1000, 1000): 17744, (1000, 2000): 16828, (2048, 128): 3538, (2048, 2048): 12194,
        (5000, 500): 3902, (20000, 2000): 1804}),
    *_table("llama-3.1-70b", "h100", 2, "fp8", {
        (1000, 1000): 4205, (1000, 2000): 4146, (2048, 128): 762, (2048, 2048): 3082,
        (5000, 500): 898, (20000, 2000): 437}),
    *_table("llama-3.1-70b", "h200", 1, "fp8", {
        (1000, 1000): 2909, (1000, 2000): 2994, (2048, 128): 442, (2048, 2048): 2003,
        (5000, 500): 566, (20000, 2000): 283}),
    *_table("llama-3.1-70b", "h200", 2, "fp8", source="trt-new", tokens_per_s={
        (1000, 1000): 2 * 2587, (1024, 8192): 2 * 2009, (8192, 1024): 2 * 537,
        (32768, 1024): 2 * 120}),
    *_table("llama-3.1-405b", "h200", 8, "fp8", {
        (1000, 1000): 3330, (1000, 2000): 3722, (2048, 128): 456, (2048, 2048): 2948,
        (5000, 500): 650, (20000, 2000): 505}),
    *_table("llama-3.1-70b", "b200", 1, "fp4", fitted=(2048, 128), tokens_per_s={
        (1000, 1000): 7007, (1000, 2000): 6271, (2048, 128): 1339, (2048, 2048): 4783,
        (5000, 500): 1459, (20000, 2000): 665}),
    *_table("llama-3.1-70b", "gb200", 1, "fp4", {
        (1000, 1000): 7326, (1000, 2000): 6513, (2048, 128): 1450, (2048, 2048): 5646,
        (5000, 500): 1602, (20000, 2000): 755}),
    *_table("llama-3.1-405b", "b200", 4, "fp4", {
        (1000, 1000): 5209, (1000, 2000): 4933, (2048, 128): 749, (2048, 2048): 4212,
        (5000, 500): 1048, (20000, 2000): 672}),
    *_table("gpt-oss-20b", "h100", 1, "bf16", kv="bf16", source="trt-new", fitted=(8192, 1024),
            tokens_per_s={(1000, 1000): 11557, (1024, 8192): 8617, (8192, 1024): 3366,
                          (32768, 1024): 785}),
    *_table("gpt-oss-20b", "h200", 1, "bf16", kv="bf16", source="trt-new", tokens_per_s={
        (1000, 1000): 13858, (1024, 8192): 12743, (8192, 1024): 4015, (32768, 1024): 915}),
    *_table("llama-3.1-405b", "h100", 8, "fp8", {
        (1000, 1000): 2919, (1000, 2000): 2895, (2048, 128): 453, (2048, 2048): 2296,
        (5000, 500): 610, (20000, 2000): 345}),
    *_table("llama-3.1-405b", "gb200", 4, "fp4", {
        (1000, 1000): 5389, (1000, 2000): 5135, (2048, 128): 797, (2048, 2048): 4407,
        (5000, 500): 1112, (20000, 2000): 739}),
    *_table("qwen3-30b-a3b", "b200", 1, "fp4", {
        (1000, 1000): 25828, (1000, 2000): 22051, (2048, 128): 6251, (2048, 2048): 17554,
        (5000, 500): 6142, (20000, 2000): 2944}),
    *_table("qwen3-30b-a3b", "gb200", 1, "fp4", {
        (1000, 1000): 17481, (1000, 2000): 17177, (2048, 128): 6595, (2048, 2048): 14719,
        (5000, 500): 5908, (20000, 2000): 3203}),
    *_table("llama-3.1-70b", "h100", 2, "fp8", source="trt-new", tokens_per_s={
        (1000, 1000): 2 * 2209, (8192, 1024): 2 * 398}),
    *_table("llama-3.1-70b", "b200", 1, "fp4", source="trt-new", tokens_per_s={
        (1000, 1000): 6920, (1024, 8192): 3242, (8192, 1024): 1362, (32768, 1024): 274}),
    *_table("llama-3.1-70b", "gb200", 1, "fp4", source="trt-new", tokens_per_s={
        (1000, 1000): 7769, (1024, 8192): 3805, (8192, 1024): 1491, (32768, 1024): 302}),
    *_table("gpt-oss-120b", "h200", 1, "bf16", kv="bf16", source="trt-new", tokens_per_s={
        (1000, 1000): 6868, (1024, 8192): 3543, (8192, 1024): 1828, (32768, 1024): 519}),
    *_table("gpt-oss-120b", "gb200", 1, "bf16", source="trt-new", tokens_per_s={
        (1000, 1000): 27198, (1024, 8192): 14800, (8192, 1024): 6835, (32768, 1024): 1645}),
    *_table("gpt-oss-20b", "b200", 1, "bf16", source="trt-new", fitted=(8192, 1024), tokens_per_s={
        (1000, 1000): 53812, (1024, 8192): 34702, (8192, 1024): 11904, (32768, 1024): 2645}),
    *_table("gpt-oss-20b", "gb200", 1, "bf16", source="trt-new", tokens_per_s={
        (1000, 1000): 55823, (1024, 8192): 38100, (8192, 1024): 12941, (32768, 1024): 2905}),
    *_table("qwen3-30b-a3b", "b200", 1, "fp4", source="trt-new", fitted=(8192, 1024), tokens_per_s={
        (1000, 1000): 26971, (1024, 8192): 13497, (8192, 1024): 5735, (32768, 1024): 1265}),
    *_table("qwen3-30b-a3b", "gb200", 1, "fp4", source="trt-new", tokens_per_s={
        (1000, 1000): 22856, (1024, 8192): 14272, (8192, 1024): 6201, (32768, 1024): 1380}),
    *_total("sglang", "qwen3-14b", "fp8-block", "14b-h100", (2000, 100, 14764.26),
            (4000, 199.6, 12257.62), (32000, 99.6, 10014.29), fitted=2000),
    *_total("vllm", "qwen3-14b", "bf16", "14b-h100", (2000, 100, 10597.19),
            (4000, 199.6, 9218.03), (32000, 98.6, 8298.56), fitted=2000),
    *_total("tensorrt-llm", "qwen3-32b", "fp8-block", "32b-h100", (2000, 100, 5901.95),
            (4000, 199.8, 4929.16), (32000, 78.3, 4068.16), fitted=2000),
    *_total("tensorrt-llm", "qwen3-14b", "bf16", "14b-a100", (2000, 100, 7474.00),
            (4000, 199.5, 6418.65), (32000, 99.3, 4413.82), fitted=2000),
    *_total("vllm", "qwen3-14b", "bf16", "14b-a100", (2000, 100, 5967.13),
            (4000, 199.6, 5153.42), (32000, 98.9, 4430.14), fitted=2000),
    *_total("vllm", "gpt-oss-20b", "bf16", "20b-h100", (2000, 94.0, 32113.65),
            (4000, 104.6, 33236.17), (32000, 93.5, 29730.30), fitted=2000),
    *_total("vllm", "gpt-oss-120b", "bf16", "120b-h100", (2000, 98.1, 34083.02),
            (4000, 136.1, 34491.13), (32000, 99.6, 32471.01), num_gpus=2),
)  # fmt: skip
