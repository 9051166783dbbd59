"""Bad rewards: functions that are not there, raise, or return what is no score; models and rules that cannot score."""

from bad_desk import Kind

REWARD = "reward={kind: function, path: 'mine.py:f'}"


def function(name: str, body: str, *words: str, lines: int = 1, signature: str = "completions, **kwargs") -> Kind:
    """A reward function with something wrong, met by the first round of PPO."""
    code = f"import math\n\n\ndef f({signature}):\n    {body}\n"
    return Kind(name, f"run ppo.yaml {REWARD}", words, files={"mine.py": code}, lines=lines)


def rule(name: str, reward: str, *words: str, **more: object) -> Kind:
    """A reward config that cannot be used."""
    return Kind(name, f"run ppo.yaml reward={reward}", words, **more)


def code(name: str, text: str, *words: str, path: str = "mine.py:f", **more: object) -> Kind:
    """A file of code that a reward names."""
    return Kind(name, f"run ppo.yaml reward={{kind: function, path: '{path}'}}", words, files={"mine.py": text}, **more)


SCORING = [
    code("a function file that is not there", "", "reward", "no file gone.py", path="gone.py:f"),
    code("a function that is not in its file", "def g(**kwargs): pass\n", "ppo.yaml: reward: 'mine.py' has no 'f'"),
    code(
        "a function file that does not parse",
        "def f(:\n",
        "ppo.yaml: reward: mine.py cannot be imported: SyntaxError",
        "line 1",
    ),
    code(
        "a function file that raises",
        "raise OSError('no key')\n",
        "ppo.yaml: reward: mine.py cannot be imported: OSError: no key (mine.py, line 1)",
    ),
    code("a function path without a name", "", "path", "mine.py", path="mine.py"),
    code("a pickle as a function file", "", "reward", "'reward.pkl'", path="reward.pkl:f"),
    code("a function that is a number", "f = 3\n", "'mine.py:f' is int; name something that can be called"),
    function(
        "a function that raises",
        "return [1 / 0]",
        "reward function f",
        "ZeroDivisionError: division by zero",
        "mine.py",
        "line 5",
    ),
    function("a function that stops the program", "raise SystemExit(0)", "reward function f", "SystemExit", "mine.py"),
    function(
        "a coroutine that raises",
        "return g()\n\n\nasync def g():\n    raise KeyError('gone')",
        "reward function f",
        "KeyError: 'gone'",
        "line 9",
    ),
    function("strings as scores", "return ['1.0' for _ in completions]", "got '1.0' for", "return a number or None", lines=5),
    function(
        "nested lists as scores", "return [[1.0] for _ in completions]", "got [1.0] for", "return a number or None", lines=5
    ),
    function("infinite scores", "return [math.inf for _ in completions]", "got inf for", "finite number", lines=5),
    function(
        "NaN scores",
        "return [math.nan for _ in completions]",
        "got nan for",
        "return None where the reward does not apply",
        lines=5,
    ),
    function("too few scores", "return [1.0]", "returned 1 values for 4 rows; return one per row"),
    function("a number for the whole batch", "return 1.0", "returned float '1.0'", "return a list"),
    function("a generator of scores", "return (1.0 for _ in completions)", "returned generator", "return a list"),
    function("None for all", "return [None for _ in completions]", "none of the round's rollouts has a score (not_applicable)"),
    function(
        "a column that is not there",
        "return [0.0]",
        "needs reference; there is completions; add the column",
        signature="completions, reference",
    ),
    Kind(
        "a column named like an argument",
        f"run ppo.yaml {REWARD} data.path=rows.jsonl",
        ("a column 'completions', which is an argument; rename it",),
        files={
            "mine.py": "def f(completions, **kwargs):\n    return [0.0 for _ in completions]\n",
            "rows.jsonl": [{"prompt": "Hello", "completions": "x"}] * 4,
        },
    ),
    Kind(
        "plain strings of a long dialogue",
        "run ppo.yaml reward={kind: function, path: 'mine.py:f', format: plain} data.path=rows.jsonl",
        ("has 3 messages before the answer", "format: conversational"),
        files={
            "mine.py": "def f(completions, **kwargs):\n    return [0.0 for _ in completions]\n",
            "rows.jsonl": [
                {
                    "prompt": [
                        {"role": "user", "content": "Hello"},
                        {"role": "assistant", "content": "Yes"},
                        {"role": "user", "content": "Why"},
                    ]
                }
            ],
        },
    ),
    rule("an unknown reward", "{kind: lenght, target: 1, penalty: 1}", "reward: kind is 'lenght'; did you mean 'length'?"),
    rule("a reward without a kind", "{path: x}", "reward: kind is None"),
    rule("a reward that is text", "length", "reward is 'length'", "mapping"),
    rule("a pattern that does not compile", "{kind: regex, pattern: '('}", "reward", "pattern '(' is no regular expression"),
    rule("a negative penalty", "{kind: length, target: 1, penalty: -1}", "reward: penalty is -1", "greater than 0"),
    rule(
        "tokens without a tokenizer",
        "{kind: length, target: 1, penalty: 1, unit: tokens}",
        "unit: tokens and tokenizer: FOLDER go together",
    ),
    rule("a sum of nothing", "{kind: sum, scorers: []}", "reward: scorers is []", "at least 1"),
    rule("weights that are all 0", "{kind: sum, scorers: [{scorer: {kind: gold}, weight: 0}]}", "every weight is 0"),
    rule(
        "a weight that is NaN",
        "{kind: sum, scorers: [{scorer: {kind: gold}, weight: .nan}]}",
        "scorers.0.weight is nan",
        "finite number",
    ),
    rule(
        "a sum of an unknown reward", "{kind: sum, scorers: [{scorer: {kind: golf}}]}", "kind is 'golf'; did you mean 'gold'?"
    ),
    rule("gold of an unknown world", "{kind: gold, world: trip_dsk}", "'trip_dsk'; did you mean 'trip_desk'?"),
    rule(
        "gold of another world's words",
        "{kind: gold} data.path=rows.jsonl",
        "rows.jsonl:",
        files={"rows.jsonl": [{"prompt": "What is 3 + 4?"}] * 4},
    ),
    rule("a reward model that is not there", "{kind: reward_model, path: gone}", "gone", "is not a folder"),
    rule(
        "a pickle as a reward model",
        "{kind: reward_model, path: reward.pkl}",
        "reward.pkl is a file; give a folder",
        files={"reward.pkl": b"\x80\x04N."},
    ),
    rule(
        "a reward model that finds all too long",
        "{kind: reward_model, path: $reward, max_length: 2}",
        "none of the round's rollouts has a score (too_long)",
    ),
    rule(
        "a reward model on a device that is not there",
        "{kind: reward_model, path: $reward, device: cuda:9}",
        "device is 'cuda:9'",
        "cpu",
    ),
    rule(
        "a reward model on a device that is none", "{kind: reward_model, path: $reward, device: gpu}", "device is 'gpu'", "cpu"
    ),
    rule(
        "a rule of an ensemble without its coefficient",
        "{kind: reward_model, path: $ensemble, aggregate: {rule: lower_bound}}",
        "reward: coef is missing: rule lower_bound",
        "write coef: 0.5",
    ),
    rule(
        "a coefficient for a rule that has none",
        "{kind: reward_model, path: $ensemble, aggregate: {coef: 0}}",
        "reward: coef is 0.0, and rule mean has none",
    ),
    rule(
        "an unbiased spread of one member",
        "{kind: reward_model, path: $reward, aggregate: {rule: lower_bound, coef: 1, ddof: 1}}",
        "ddof is 1 with 1 member",
        "use ddof: 0, or more members",
    ),
    rule(
        "members centered by a group in PPO",
        "{kind: reward_model, path: $ensemble, aggregate: {rule: worst_case, center: group}}",
        "center is group, which needs all answers to a prompt together",
    ),
    rule(
        "members centered by moments that are not there",
        "{kind: reward_model, path: $ensemble, aggregate: {center: calibration}}",
        "center is calibration, and the reward model holds no moments of its scores",
    ),
    rule(
        "a reference answer that is no column",
        "{kind: reward_model, path: $ensemble, aggregate: {rule: worst_case, center: reference}}",
        "its column 'reference' is None; aggregate.center: reference needs the text of an answer there",
        lines=5,
    ),
    rule("a registry that is not there", "{kind: registered, registry: gone.yaml, name: a}", "gone.yaml: no such registry"),
    rule(
        "an unknown entry of a registry",
        "{kind: registered, registry: models.yaml, name: goldd}",
        "models.yaml: no entry 'goldd'; did you mean 'gold'?",
        files={"models.yaml": "gold: {kind: gold}\n"},
    ),
    rule(
        "an entry that points nowhere",
        "{kind: registered, registry: models.yaml, name: b}",
        "models.yaml:3: entry 'b': 'gone/model' is not there (looked for",
        "paths are relative to the registry's folder",
        files={"models.yaml": "gold: {kind: gold}\n\nb: {kind: reward_model, path: gone/model}\n"},
    ),
    rule(
        "a name twice in a registry",
        "{kind: registered, registry: models.yaml, name: a}",
        "models.yaml: not a valid registry: the key 'a' is given twice, line 2",
        files={"models.yaml": "a: {kind: gold}\na: {kind: gold}\n"},
    ),
    rule(
        "an entry that is a path",
        "{kind: registered, registry: models.yaml, name: a}",
        "models.yaml:1: entry 'a' is 'runs/a/model'; write a scorer, such as {kind: reward_model, path: FOLDER}",
        files={"models.yaml": "a: runs/a/model\n"},
    ),
    rule(
        "an entry that leads back to itself",
        "{kind: registered, registry: models.yaml, name: a}",
        "models.yaml: entry 'a' leads back to itself",
        files={"models.yaml": "a: {kind: registered, registry: models.yaml, name: a}\n"},
    ),
    rule(
        "an aggregate for an entry that has no members",
        "{kind: registered, registry: models.yaml, name: gold, aggregate: {rule: median}}",
        "models.yaml: entry 'gold' is a gold; aggregate belongs to reward models",
        files={"models.yaml": "gold: {kind: gold}\n"},
    ),
    Kind(
        "a registry without entries",
        "score $pairs --reward models.yaml",
        ("models.yaml: no entries; train a reward model",),
        files={"models.yaml": ""},
    ),
    Kind(
        "explaining a whole registry",
        "score $pairs --reward models.yaml --explain",
        ("--explain reads one reward model; name one as models.yaml:NAME, of a, b",),
        files={"models.yaml": "a: {kind: gold}\nb: {kind: gold}\n"},
    ),
    rule(
        "a scorer of one's own that returns numbers",
        "{kind: 'mine.py:Mine'}",
        "it must give a list with one rewarden.types.Score per conversation",
        files={
            "mine.py": "from rewarden.spec import Spec\n\n\nclass Mine(Spec):\n    def build(self):\n        return self\n\n"
            "    def score(self, conversations):\n        return [1.0 for _ in conversations]\n"
        },
    ),
    rule(
        "a function named as a kind",
        "{kind: 'mine.py:f'}",
        "kind 'mine.py:f' is no Spec with a build()",
        "kind: function",
        files={"mine.py": "def f(**kwargs):\n    return []\n"},
    ),
    Kind(
        "a scorer named like a measure",
        "run compare.yaml scorers={kl: {kind: gold}}",
        ("scorers.kl: 'kl' is a measure that is always taken",),
    ),
    Kind(
        "a vote of one model",
        "run vote.yaml scorers.mine.path=$reward",
        ("scorers: mine has one vote in all; a vote needs two or more models",),
    ),
    Kind(
        "a fold that nobody left out",
        "run vote.yaml folds=2 unseen={mine: 0}",
        ("unseen: no scorer for fold 1, whose pairs nobody could judge", "data: {folds: 2, fold: 1, part: train}"),
    ),
    Kind(
        "a mean of one model",
        "run average.yaml models=[{model_name_or_path: $reward}]",
        ("one member has no mean; give two or more",),
    ),
    Kind(
        "a mean of heads on one trunk",
        "run average.yaml models=[{model_name_or_path: $ensemble}]",
        ("has 2 heads on one trunk, whose mean is the mean of their scores",),
    ),
    Kind(
        "an LM loss from a reward model",
        "run reward.yaml lm_coef=1 model.model_name_or_path=$reward",
        ("is a reward model, without the LM head that the LM loss needs; start from a language model",),
    ),
    Kind(
        "a comparison on one prompt",
        "run compare.yaml data.max_rows=1",
        (
            "1 prompts left",
            "a paired comparison with an interval needs two or more",
        ),
    ),
    Kind(
        "a comparison of prompts that are all too long",
        "run compare.yaml data.path=rows.jsonl",
        ("rows.jsonl", "0 prompts left", "2 longer_than_319_tokens"),
        files={"rows.jsonl": [{"prompt": "Hello. " * 400}] * 2},
    ),
    Kind(
        "a comparison in another world's words",
        "run compare.yaml data.path=rows.jsonl world={kind: trip_desk}",
        ("rows.jsonl:",),
        files={"rows.jsonl": [{"prompt": "What is 3 + 4?"}] * 4},
    ),
    Kind(
        "pairs that are all ties",
        "run r.yaml policy.model_name_or_path=$policy",
        ("pairs_test", "num_test_pairs", "1"),
        files={
            "r.yaml": "kind: world_pairs\nnum_pairs: 0\nnum_test_pairs: 1\nnum_prompts: 0\nnum_selection: 0\nnum_heldout: 0\n"
        },
    ),
]
"""Every kind of bad reward and of bad measurement."""
