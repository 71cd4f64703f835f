"""Functions of the user with the signatures of Quartet, TRL and verl, and with faults for responses with the mark."""

FUNCTIONS = '''
import os, time

class Refused(Exception):
    outcome = "refused"

def faulty(fault, response):
    """Return a wrong score, raise, hang or die if the response has the mark; otherwise return its score."""
    score = len(response.split()) / 4
    if not fault or "w9" not in response.split():
        return score
    if fault == "hang":
        time.sleep(60)
    if fault in ("error", "overloaded"):
        raise RuntimeError("secret " + response)
    if fault == "refusal":
        raise Refused("secret " + response)
    if fault in ("cut", "reset"):
        os._exit(7)
    wrong = {
        "too few": [], "too many": [score, score], "nan": float("nan"), "infinity": float("inf"), "boolean": True,
        "string": "1.5", "null": None, "broken": {1, 2}, "empty": {}, "oversized": 10**400,
    }
    return wrong[fault]

def quartet(prompt, response, fields, fault=""):
    return faulty(fault, response)

def trl(prompts, completions, completion_ids, label, fault="", **columns):
    assert len(prompts) == len(completions) == len(completion_ids) == len(label), "columns are lists"
    scores = [faulty(fault, completion) for completion in completions]
    # None and NaN are how such a function declines, and True is 1, so these faults are others here.
    return [object() if score is None or score != score or score is True else score for score in scores]

def verl(data_source, solution_str, ground_truth, extra_info=None, fault=""):
    assert ground_truth == "x"
    score = faulty(fault, solution_str)
    return {"score": object() if score is True else score, "accuracy": 1.0}
'''
