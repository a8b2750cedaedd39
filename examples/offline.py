"""Answers in this process, without a server: chats, one that must be a choice, and a plain text."""

from disagg import LLM, SamplingParams, StructuredOutputsParams

QUESTIONS = ["What is the capital of France?", "What is 2 + 3?"]

with LLM("demo-small") as llm:
    greedy = SamplingParams(temperature=0, max_tokens=8)
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    for question, output in zip(QUESTIONS, llm.chat(chats, greedy), strict=True):
        print(question, output.outputs[0].text)

    choice = SamplingParams(structured_outputs=StructuredOutputsParams(choice=["yes", "no"]))
    (output,) = llm.chat([{"role": "user", "content": "Is 3 more than 2?"}], choice)
    print("It must say yes or no:", output.outputs[0].text)

    prompt = f"<|im_start|>user\n{QUESTIONS[1]}<|im_end|>\n<|im_start|>assistant\n"
    (output,) = llm.generate(prompt, greedy)
    print("Without a chat template:", output.outputs[0].text)
