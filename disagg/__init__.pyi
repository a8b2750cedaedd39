from disagg.llm.async_llm import AsyncLLM as AsyncLLM
from disagg.llm.llm import LLM as LLM
from disagg.llm.outputs import CompletionOutput as CompletionOutput
from disagg.llm.outputs import Logprob as Logprob
from disagg.llm.outputs import RequestOutput as RequestOutput
from disagg.llm.params import SamplingParams as SamplingParams
from disagg.llm.params import StructuredOutputsParams as StructuredOutputsParams
