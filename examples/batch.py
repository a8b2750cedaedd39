"""A file of requests, answered by `disagg batch` with a model of its own."""

import json
import subprocess
import sys
from pathlib import Path

QUESTIONS = ["What is the capital of France?", "What is 2 + 3?", "What is 1 + 4?"]

with Path("in.jsonl").open("w") as lines:
    for number, question in enumerate(QUESTIONS, start=1):
        messages = [{"role": "user", "content": question}]
        request = {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {"messages": messages, "max_tokens": 8, "temperature": 0},
        }
        print(json.dumps(request), file=lines)

words = ["batch", "in.jsonl", "--output", "out.jsonl", "--model", "demo-small"]
subprocess.run([sys.executable, "-m", "disagg.cli.main", *words], check=True)

answers = [json.loads(line) for line in Path("out.jsonl").read_text().splitlines()]
for answer in sorted(answers, key=lambda each: each["custom_id"]):
    body = answer["response"]["body"]
    print(answer["custom_id"], body["choices"][0]["message"]["content"])
