"""Bad recipes: YAML that is none, keys and values that cannot be used, stages that do not fit together."""

from bad_desk import Content, Kind


def recipe(name: str, content: Content, *words: str, command: str = "run r.yaml", **more: object) -> Kind:
    """A recipe file that cannot be used."""
    return Kind(name, command, words, files={"r.yaml": content}, **more)


def value(name: str, override: str, *words: str, job: str = "sft", **more: object) -> Kind:
    """One value of a good recipe set to something that cannot be used."""
    return Kind(name, f"run {job}.yaml {override}", (f"{job}.yaml: ", *words), **more)


def own(name: str, code: str, *words: str, kind: str = "mine.py:Mine") -> Kind:
    """A job of one's own in a file that cannot be used."""
    return Kind(name, "run r.yaml", words, files={"mine.py": code, "r.yaml": f"kind: '{kind}'\n"})


STAGES = "stages:\n  - {stage: a, kind: world_start}\n"
LAUGHS = "a0: &a0 [x, x, x, x, x, x, x, x, x, x]\n" + "".join(
    f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 10)}]\n" for n in range(1, 12)
)

RECIPES = [
    Kind("a recipe that is not there", "run nothing.yaml", ("nothing.yaml: no such recipe",)),
    Kind("a misspelt recipe", "run sfd.yaml", ("sfd.yaml: no such recipe", "did you mean 'sft.yaml'?")),
    Kind("a folder as a recipe", "run .", (".: cannot be read", "give the path of a YAML file")),
    recipe("an empty recipe", "", "r.yaml: holds NoneType; a recipe is a mapping"),
    recipe("a list as a recipe", "- kind: sft\n", "r.yaml: holds list; a recipe is a mapping"),
    recipe("not YAML", "kind: [sft\n", "r.yaml: not a valid recipe", "line 2"),
    recipe("tabs", "kind: sft\ndata:\n\tpath: x\n", "r.yaml: not a valid recipe", "'\\t'", "line 3"),
    recipe("a recipe in UTF-16", "kind: sft\n".encode("utf-16"), "r.yaml: cannot be read"),
    recipe("a key twice", "kind: sft\nkind: ppo\n", "r.yaml: not a valid recipe: the key 'kind' is given twice, line 2"),
    recipe("a key that is a number", "kind: sft\n3: x\n", "the key 3 is no word", "line 2"),
    recipe("a tag that runs code", "kind: !!python/object/apply:os.getcwd []\n", "r.yaml: not a valid recipe", "python/object"),
    recipe("an alias that holds itself", "kind: sft\ndata: &a {path: *a}\n", "r.yaml: not a valid recipe"),
    recipe("aliases that grow without end", f"kind: sft\n{LAUGHS}", "r.yaml: not a valid recipe", "alias"),
    recipe("no kind", "model: {}\n", "r.yaml: no `kind:`; one of "),
    recipe("an unknown kind", "kind: sfft\n", "r.yaml: kind is 'sfft'; did you mean 'sft'?"),
    recipe("a kind that is a list", "kind: [sft]\n", "r.yaml: kind is ['sft']"),
    recipe("missing keys", "kind: sft\n", "r.yaml: model is missing", "r.yaml: data is missing", lines=2),
    value("an unknown key", "lerning_rate=1", "unknown key 'lerning_rate'"),
    value("a misspelt key", "max_step=1", "unknown key 'max_step'; did you mean 'max_steps'?"),
    value("a misspelt key inside", "optim.learning_rte=1", "unknown key 'optim.learning_rte'; did you mean 'learning_rate'?"),
    value("a text where a mapping belongs", "data=rows.jsonl", "data is 'rows.jsonl'", "mapping"),
    value("a text where a number belongs", "optim.learning_rate=fast", "optim.learning_rate is 'fast'", "number"),
    value("None where a number belongs", "train_batch_size=None", "train_batch_size is None", "integer"),
    value("a quoted None", "optim.max_grad_norm='\"None\"'", "optim.max_grad_norm is 'None'", "number"),
    value("true where a number belongs", "train_batch_size=true", "train_batch_size is True", "number"),
    value("true where a rate belongs", "optim.learning_rate=true", "optim.learning_rate is True", "number"),
    value("true among numbers", "optim.betas=[true,0.9]", "optim.betas", "True", "number"),
    value("a fraction where a whole number belongs", "max_steps=1.5", "max_steps is 1.5", "integer"),
    value("NaN", "optim.learning_rate=.nan", "optim.learning_rate is nan", "finite number"),
    value("infinity", "optim.learning_rate=.inf", "optim.learning_rate is inf", "finite number"),
    value(
        "a negative learning rate", "optim.learning_rate=-1e-4", "optim.learning_rate is -0.0001", "greater than or equal to 0"
    ),
    value("a beta of 1", "optim.betas=[0.9,1.0]", "optim.betas is [0.9, 1.0]", "[0, 1)"),
    value("one beta", "optim.betas=[0.9]", "optim.betas", "missing"),
    value("an unknown schedule", "optim.lr_scheduler_type=cosin", "optim.lr_scheduler_type is 'cosin'", "'cosine'"),
    value("zero steps", "max_steps=0", "max_steps is 0", "greater than or equal to 1"),
    value("zero epochs", "num_train_epochs=0", "num_train_epochs is 0"),
    value("a batch of none", "train_batch_size=0", "train_batch_size is 0", "greater than or equal to 1"),
    value("a batch beyond all numbers", f"train_batch_size={10**40}", "train_batch_size is 1000", "below 2**63"),
    value("a text of 5,000 letters", f"train_batch_size={'x' * 5000}", "train_batch_size is 'xxx", "integer"),
    value("a negative microbatch", "per_device_train_batch_size=-4", "per_device_train_batch_size is -4"),
    value("a group of one", "rollout_batch_size=1", "rollout_batch_size is 1", "greater than or equal to 2", job="ppo"),
    value(
        "a minibatch larger than the round",
        "mini_batch_size=99",
        "mini_batch_size is 99; give at most rollout_batch_size=4",
        job="ppo",
    ),
    value("no completion tokens", "sampling.max_completion_length=0", "sampling.max_completion_length is 0", job="ppo"),
    value("temperature 0 in PPO", "sampling.temperature=0", "temperature 0 has no probabilities", job="ppo"),
    value("top_p above 1", "sampling.top_p=2", "sampling.top_p is 2", job="ppo"),
    value("a discount of 0", "gamma=0", "gamma is 0", "greater than 0", job="ppo"),
    value("label smoothing of one half", "label_smoothing=0.5", "label_smoothing is 0.5", "less than 0.5", job="reward"),
    value("strength that changes nothing", "strength={}", "strength changes nothing; set flip_share", job="reward"),
    value("half of all labels and more to flip", "strength={flip_share: 0.6}", "strength.flip_share is 0.6", job="reward"),
    value("margin_clip the wrong way round", "margin_clip=[1,0]", "margin_clip is [1.0, 0.0]; write the lower", job="reward"),
    value(
        "an LM loss beside a frozen trunk",
        "lm_coef=1 model.trainable_layers=0",
        "lm_coef is 1 and model.trainable_layers is 0",
        job="reward",
    ),
    value("diversity without LoRA members", "diversity_coef=1", "diversity_coef is 1 and the family is single", job="reward"),
    value("a vote of nobody", "scorers={}", "scorers is empty, and there is no registry; name who votes", job="vote"),
    value("a mean of no models", "models=[]", "models is []", job="average"),
    value("dropout that never acts", "model.lora_r=2 model.lora_dropout=0.1", "lora_dropout is 0.1, but dropout is off"),
    value("an unknown data format", "data.format=jsonl", "data.format is 'jsonl'", "'trl'"),
    value("an unknown tracker", "report_to=mlflow", "report_to.0 is 'mlflow'", "'tensorboard'"),
    value("an unknown view", "view=fancy", "view is 'fancy'", "'plain'"),
    value("a grid of a key that is not there", "grid={sed: [1,2]}", "grid.sed: the recipe has no 'sed'"),
    Kind("an override without a value", "run sft.yaml max_steps", ("override 'max_steps': write path=value",)),
    Kind("an override that is not YAML", 'run sft.yaml max_steps="1', ("override 'max_steps=\"1': the value is not YAML",)),
    Kind("an override with an empty part", "run sft.yaml optim..eps=1", ("override 'optim..eps=1': write path=value",)),
    Kind(
        "an override below a value",
        "run sft.yaml max_steps.x=1",
        ("override 'max_steps.x=1': max_steps is 2, which has no keys",),
    ),
    Kind(
        "an override of a stage that is not there",
        "run chain.yaml sfft.max_steps=1",
        ("override 'sfft.max_steps=1': the recipe has no 'sfft'", "did you mean 'sft'?"),
    ),
    Kind("an unknown resume mode", "run sft.yaml --resume maybe", ("resume is 'maybe'; use one of auto, must, never",)),
    Kind("a name that leads away", "run sft.yaml name=..", ("name is '..'",)),
    Kind("an empty name", "run sft.yaml name=", ("name is None; write a word",)),
    recipe("no stages", "stages: []\n", "r.yaml: stages is []; write a list"),
    recipe("stages that are a mapping", "stages: {a: {kind: sft}}\n", "r.yaml: stages is {", "write a list"),
    recipe("a stage without a name", "stages:\n  - {kind: sft}\n", "r.yaml: stages[0] has no `stage:` name"),
    recipe("a stage name that is a path", "stages:\n  - {stage: a/b, kind: sft}\n", "stage name 'a/b' is no plain word"),
    recipe("two stages of one name", STAGES + "  - {stage: a, kind: sft}\n", "two stages are named 'a'"),
    recipe(
        "a stage that reads itself",
        "stages:\n  - {stage: a, kind: sft, data: {path: '${a}/x'}}\n",
        "stage a.data.path: ${a} comes later in the recipe",
    ),
    recipe(
        "stages in a circle",
        "stages:\n  - {stage: a, kind: sft, data: {path: '${b}/x'}}\n  - {stage: b, kind: sft, data: {path: '${a}/x'}}\n",
        "stage a.data.path: ${b} comes later in the recipe; move it up",
    ),
    recipe(
        "a stage that reads what no stage is called",
        STAGES + "  - {stage: b, kind: sft, data: {path: '${aa}/x'}}\n",
        "${aa} is neither an earlier stage nor a value; did you mean 'a'?",
    ),
    Kind(
        "a stage that reads what no stage writes",
        "run chain.yaml sft.data.path=${start}/sfft.jsonl",
        ("sfft.jsonl: no such file", "did you mean 'sft.jsonl'?"),
    ),
    recipe("a value that no stage uses", f"sed: 3\n{STAGES}", "no stage uses the value 'sed'"),
    recipe("a value named like a stage", f"a: 3\n{STAGES}", "'a' is both a value and a stage"),
    recipe(
        "a stage from a recipe that is not there", "stages:\n  - {stage: a, recipe: sfd.yaml}\n", "sfd.yaml: no such recipe"
    ),
    recipe("a stage from a chain", "stages:\n  - {stage: a, recipe: chain.yaml}\n", "chain.yaml is a chain itself"),
    recipe(
        "a misspelt key in the last stage",
        STAGES + "  - {stage: b, kind: world_start, num_dialogs: 3}\n",
        "stage b: unknown key 'num_dialogs'; did you mean 'num_dialogues'?",
    ),
    recipe(
        "an unknown world", "kind: world_start\nworld: {kind: trip_dsk}\n", "world", "'trip_dsk'; did you mean 'trip_desk'?"
    ),
    own("a job in a file that is not there", "", "no file 'gone.py'", kind="gone.py:Mine"),
    own("a job that is not in its file", "class Mime: pass\n", "'mine.py' has no 'Mine'; did you mean 'Mime'?"),
    own("a job that is no config", "class Mine: pass\n", "kind 'mine.py:Mine' is no Spec with build(ranks) or run(folder)"),
    own("a job in a file that does not parse", "class Mine(\n", "mine.py", "line 1"),
    own("a job in a file that raises", "x = 1\n1 / 0\n", "mine.py", "ZeroDivisionError", "line 2"),
    own("a job in a file that imports what is not there", "import nowhere_at_all\n", "mine.py", "nowhere_at_all"),
    own("a job of a module that is not there", "", "no module 'nowhere_at_all'", kind="nowhere_at_all:Mine"),
    Kind("overrides of the demo that lead nowhere", "demo nothing=1", ("the recipe has no 'nothing'",)),
    Kind("show of a recipe that cannot run", "show ppo.yaml beta=-1", ("ppo.yaml: beta is -1",)),
    Kind("a command that is not there", "trian sft.yaml", ("No such command 'trian'",), lines=9),
    Kind("an option that is not there", "run sft.yaml --resum auto", ("No such option", "--resum"), lines=9),
    Kind("a command without its recipe", "run", ("Missing argument 'RECIPE.yaml'",), lines=9),
]
"""Every kind of bad recipe."""
