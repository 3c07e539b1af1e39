from tests.cli import ROOT


def test_the_page_of_your_model_opens_with_the_file_that_the_tests_run():
    page = (ROOT / "docs" / "your-model.md").read_text(encoding="utf-8")
    code = (ROOT / "recipes" / "your_model.py").read_text(encoding="utf-8")
    assert page.split("```python\n")[1].split("```")[0] == code


def test_the_page_of_publishing_opens_with_the_loop_that_the_tests_run():
    page = (ROOT / "docs" / "publish.md").read_text(encoding="utf-8")
    code = (ROOT / "recipes" / "rl_miniature.py").read_text(encoding="utf-8")
    loop = page.split("```python\n")[1].split("```")[0]
    assert loop.startswith("def learn(")
    assert f"\n\n\n{loop}\n\nif __name__" in code
