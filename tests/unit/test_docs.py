from tests.cli import ROOT


def test_the_page_of_your_model_opens_with_the_file_that_the_tests_run():
    page = (ROOT / "docs" / "your-model.md").read_text(encoding="utf-8")
    code = (ROOT / "recipes" / "your_model.py").read_text(encoding="utf-8")
    assert page.split("```python\n")[1].split("```")[0] == code
