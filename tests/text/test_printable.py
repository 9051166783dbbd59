from rewarden.text.printable import printable


def test_control_characters_are_spelled_and_lines_stay_lines():
    assert printable("red \x1b[31m, bell \x07,\n\ttabbed") == "red \\x1b[31m, bell \\x07,\n\ttabbed"


def test_in_one_line_line_breaks_are_spelled_too():
    assert printable("a\nb\t\u200b", kept="") == "a\\nb\\t\\u200b"


def test_what_can_be_seen_stays_as_it_is():
    assert printable("Ġéß 漢字 'quoted\" \\n") == "Ġéß 漢字 'quoted\" \\n"
