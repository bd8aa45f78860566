#!/usr/bin/env python3
"""Talks to a served demo with the public SDK, synchronously and asynchronously, and validates /openapi.json.

    sdk.py BASE_URL [KEY]
"""

import asyncio
import json
import sys
import urllib.request

from openapi_spec_validator import validate
from typesafe_sdk import (
    AsyncTypeSafeClient,
    Choice,
    ChoiceAnswer,
    Noul,
    NoulAnswer,
    Score,
    ScoreAnswer,
    TypeSafeAuthenticationError,
    TypeSafeClient,
    TypeSafeUnprocessableEntityError,
)

STATE = {"ticket": "I was charged twice for order 4411. Please refund one.", "customer": {"since": 2019}}
QUESTIONS = {
    "refund": Noul(instructions="Does the customer want money back?"),
    "team": Choice(instructions="Who answers?", criteria={"billing": "payments", "shipping": None}),
    "urgency": Score(instructions="How urgent is it?", criteria=["low", "medium", "high"]),
}


def check(response):
    refund, team, urgency = (response.answers[name] for name in QUESTIONS)
    assert isinstance(refund, NoulAnswer) and 0 <= refund.noul <= 1, refund
    assert isinstance(team, ChoiceAnswer) and team.choice in ("billing", "shipping"), team
    assert abs(sum(team.probabilities.values()) - 1) < 1e-3, team
    assert isinstance(urgency, ScoreAnswer) and 0 <= urgency.score <= 2, urgency
    assert urgency.legend == {0: "low", 1: "medium", 2: "high"}, urgency
    assert response.usage.input_tokens > 0 and response.usage.output_tokens > 0, response.usage
    return {name: answer.model_dump() for name, answer in response.answers.items()}


def models(listed):
    names = {model.name for model in listed.models}
    assert {"kev-latest", "jev-latest"} <= names, names
    assert all(model.description and model.release_date for model in listed.models), listed


async def asynchronous(url, key):
    async with AsyncTypeSafeClient(api_key=key, base_url=url) as client:
        models(await client.models.list())
        responses = await asyncio.gather(*(client.system_one(STATE, QUESTIONS) for _ in range(16)))
        return [check(response) for response in responses]


def main():
    url = sys.argv[1]
    key = sys.argv[2] if len(sys.argv) > 2 else None
    with urllib.request.urlopen(f"{url}/openapi.json") as response:
        document = json.load(response)
    validate(document)
    assert document["openapi"].startswith("3.1"), document["openapi"]
    with TypeSafeClient(api_key=key or "none", base_url=url) as client:
        models(client.models.list())
        first = check(client.system_one(STATE, QUESTIONS))
        try:
            client.system_one(STATE, QUESTIONS, extra_body={"questions": {}})
            sys.exit("a request without questions was answered")
        except TypeSafeUnprocessableEntityError:
            pass
    if key:
        try:
            with TypeSafeClient(api_key="another", base_url=url) as client:
                client.system_one(STATE, QUESTIONS)
            sys.exit("another key was accepted")
        except TypeSafeAuthenticationError:
            pass
    together = asyncio.run(asynchronous(url, key or "none"))
    assert all(answers == first for answers in together), "answers differ between requests"
    print(f"sdk: models, {1 + len(together)} equal answers, refusals and openapi {document['openapi']}: ok")


if __name__ == "__main__":
    main()
