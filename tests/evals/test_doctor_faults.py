"""The table of planted faults: in data that are clean but for one, the doctor names that one, and nothing else."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))

from doctor_desk import CLEAN, Fault, as_lines, clean, letters_tokenizer, put, save_model
from doctor_faults_model import FOLDER, ROWS, world
from doctor_faults_read import FILES, FORM, LEFT_OUT
from doctor_faults_rows import COLUMNS, LABELS, REPEATS, TEXTS

from rewarden.evals.doctor import Diagnosis, Doctor, diagnose
from rewarden.evals.doctor_kinds import KINDS, SEVERITIES

WITHOUT_MODEL = [*FILES, *FORM, *LEFT_OUT, *TEXTS, *LABELS, *REPEATS, *COLUMNS]
WITH_MODEL = [*FOLDER, *ROWS]
EXIT = {"error": 3, "warning": 1, "note": 0}


@pytest.fixture(scope="session")
def letters(tmp_path_factory) -> Path:
    return save_model(tmp_path_factory.mktemp("letters") / "model", letters_tokenizer())


@pytest.fixture
def here(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return Path()


def planted(fault: Fault, folder: Path) -> dict:
    """The data of a fault, as the config that reads them."""
    rows = clean(fault.kind)
    if fault.spoil is not None:
        fault.spoil(rows)
    lines = as_lines(rows)
    file = folder / "rows.jsonl"
    file = put(file, "".join(lines)) if fault.write is None else fault.write(file, lines)
    config: dict = {"data": {"path": str(file)}, **fault.options}
    if fault.eval_rows is not None:
        config["eval_data"] = {"path": str(put(folder / "held.jsonl", "".join(as_lines(fault.eval_rows))))}
    return config


def found(diagnosis: Diagnosis) -> list[tuple]:
    return [(one.code, one.severity, one.count, [place.where for place in one.examples]) for one in diagnosis.findings]


def check(fault: Fault, diagnosis: Diagnosis) -> None:
    places = [place if isinstance(place, str) else f"rows.jsonl:{place}" for place in fault.at]
    assert found(diagnosis) == [(fault.code, fault.severity, fault.count or len(places), places)]
    assert fault.detail in diagnosis.findings[0].examples[0].detail
    assert diagnosis.exit_code == EXIT[fault.severity]


@pytest.mark.parametrize("kind", [kind for kind in CLEAN if kind != "world"])
def test_clean_data_give_no_findings(kind, letters, here):
    file = put(here / "rows.jsonl", "".join(as_lines(clean(kind))))
    for model in (None, {"model_name_or_path": str(letters)}):
        diagnosis = diagnose(Doctor(data={"path": str(file)}, model=model))
        assert found(diagnosis) == []
        assert diagnosis.exit_code == 0
        assert len(diagnosis.examined[0].source.entries) == 6


def test_clean_data_of_the_world_give_no_findings_with_its_model(here):
    file = put(here / "rows.jsonl", "".join(as_lines(clean("world"))))
    diagnosis = diagnose(Doctor(data={"path": str(file)}, model={"model_name_or_path": str(world(here / "model"))}))
    assert found(diagnosis) == []


@pytest.mark.parametrize("fault", WITHOUT_MODEL, ids=str)
def test_the_doctor_names_exactly_the_planted_fault(fault, here):
    check(fault, diagnose(Doctor(**planted(fault, here))))


@pytest.mark.parametrize("fault", WITHOUT_MODEL, ids=str)
def test_a_model_at_hand_adds_no_finding_to_a_fault_of_the_data(fault, here, letters):
    check(fault, diagnose(Doctor(**planted(fault, here), model={"model_name_or_path": str(letters)})))


@pytest.mark.parametrize("fault", WITH_MODEL, ids=str)
def test_the_doctor_names_exactly_the_fault_planted_in_the_model_or_its_tokens(fault, here, letters):
    folder = letters if fault.model is None else fault.model(here / "model")
    check(
        fault, diagnose(Doctor(**planted(fault, here), model={"model_name_or_path": str(folder), "template": fault.template}))
    )


def test_the_table_plants_more_than_enough_kinds_of_faults():
    assert len({fault.code for fault in (*WITHOUT_MODEL, *WITH_MODEL)}) >= 75


def test_every_planted_severity_is_one_of_three():
    assert {kind.severity for kind in KINDS.values()} == set(SEVERITIES)
