"""The playground in real browsers: the real binary, and the real model unless a test says what the model answers.

Firefox is driven over WebDriver BiDi, as Debian ships it; its tests are slow ones (`make chaos`).
"""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

import jsonschema
import pytest
from binary import TIMEOUT_S, Server
from client import ask
from node import install, needs_node

sync_api = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
Browser, Page, expect = sync_api.Browser, sync_api.Page, sync_api.expect

REMOTE = "server.test"
SOURCE = Path(__file__).parent.parent / "playground"

# Fields of a chat request that are not among the page's parameters: those with controls of their own, older names of
# others, and those without a meaning in a stream.
ELSEWHERE = {
    *("messages", "prompt", "best_of", "model", "stream", "stream_options", "logprobs", "top_logprobs"),
    *("tools", "tool_choice", "parallel_tool_calls", "add_generation_prompt", "prompt_logprobs", "return_token_ids"),
    "return_drafts",
    *("response_format", "grammar", "structured_outputs", "max_completion_tokens"),
    *("guided_json", "guided_regex", "guided_choice", "guided_grammar", "guided_whitespace_pattern"),
}
STORE_LONG_CONVERSATION = r"""
new Promise((resolve, reject) => {
  const request = indexedDB.open("penstock-playground", 1);
  request.onerror = () => reject(request.error);
  request.onsuccess = () => {
    const text = (n) => `message ${n} with **bold**, \`code\` and a list\n\n- one\n- two`;
    const message = (_, n) => [`m${n}`, {
      id: `m${n}`, parent: n ? `m${n - 1}` : null, role: n % 2 ? "assistant" : "user", content: text(n), finish: "stop",
    }];
    const head = {id: "long", title: "long", mode: "chat", changed: Date.now()};
    const transaction = request.result.transaction(["heads", "conversations"], "readwrite");
    transaction.objectStore("heads").put(head);
    transaction.objectStore("conversations").put(
      {...head, messages: new Map(Array.from({length: 2000}, message)), chosen: new Map()});
    transaction.oncomplete = () => { request.result.close(); resolve(); };
  };
})
"""

pytestmark = pytest.mark.xdist_group("playground")
# Reading waits for all writes that the page has begun.
WAIT_FOR_WRITES = """
new Promise((resolve) => {
  const request = indexedDB.open("penstock-playground", 1);
  request.onsuccess = () => {
    const transaction = request.result.transaction(["heads", "conversations"]);
    transaction.objectStore("heads").count();
    transaction.oncomplete = () => { request.result.close(); resolve(); };
  };
})
"""
# Waits until the browser has stored an answer that is not empty.
WAIT_FOR_STORED_TEXT = """
new Promise((resolve) => {
  const request = indexedDB.open("penstock-playground", 1);
  const isAnswer = (message) => message.role === "assistant" && message.content;
  const look = () => {
    const all = request.result.transaction("conversations").objectStore("conversations").getAll();
    all.onsuccess = () => {
      if (all.result.some(({messages}) => [...messages.values()].some(isAnswer))) resolve();
      else setTimeout(look, 50);
    };
  };
  request.onsuccess = look;
})
"""


@pytest.fixture(scope="module", params=["chromium", pytest.param("firefox", marks=pytest.mark.slow)])
def browser(request: pytest.FixtureRequest) -> Iterator[Browser]:
    """Both browsers see `REMOTE` as a name that is not this machine's, as in a network."""
    expect.set_options(timeout=1000 * TIMEOUT_S)  # the browser shares two cores with the model and with other tests
    with sync_api.sync_playwright() as playwright:
        if request.param == "chromium":
            resolve = f"--host-resolver-rules=MAP {REMOTE} 127.0.0.1"
            running = playwright.chromium.launch(executable_path=installed("chromium"), args=[resolve])
        else:
            preferences = {"network.dns.localDomains": REMOTE}
            running = playwright.firefox.launch(
                executable_path=installed("firefox-esr", "firefox"),
                channel="moz-firefox",
                firefox_user_prefs=preferences,
            )
        yield running
        running.close()


def installed(*names: str) -> str:
    """The path of the first of these programs that there is."""
    for name in names:
        if (path := shutil.which(name)) is not None:
            return path
    pytest.skip(f"needs {names[0]}, such as Debian's package")


def needs_chromium(browser: Browser, what: str) -> None:
    if browser.browser_type.name != "chromium":
        pytest.skip(f"Playwright does not {what} over WebDriver BiDi")


def open_page(browser: Browser, **options: Any) -> Page:
    """A page of a new profile, whose actions have the time of `expect`."""
    page = browser.new_page(**options)
    page.set_default_timeout(1000 * TIMEOUT_S)
    return page


@pytest.fixture
def page(browser: Browser, server: Server) -> Iterator[Page]:
    """A new profile on the playground. At the end there was no error on the console, and no request to another host."""
    page = open_page(browser, viewport={"width": 1400, "height": 850})
    errors: list[str] = []
    hosts: set[str] = set()
    page.on("console", lambda message: errors.append(message.text) if is_error(message) else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("request", lambda request: hosts.add(urlsplit(request.url).netloc))
    page.goto(f"{server.url}/playground")
    expect(page.get_by_label("temperature", exact=True)).to_be_visible()
    yield page
    page.close()
    assert errors == []
    assert hosts <= {urlsplit(server.url).netloc, ""}


def is_error(message: sync_api.ConsoleMessage) -> bool:
    """The browser itself reports every refused request."""
    return message.type == "error" and not re.search("responded with a status of 40[01]", message.text)


def say(page: Page, text: str) -> None:
    page.locator("#draft").fill(text)
    page.locator("#draft").press("Enter")


def fields(document: dict[str, Any], schema: dict[str, Any]) -> set[str]:
    """The fields of a schema that have an effect."""
    if "$ref" in schema:
        return fields(document, document["components"]["schemas"][schema["$ref"].rsplit("/")[-1]])
    without_effect = ("Not supported", "Accepted without effect", "Only `text`")
    properties = schema.get("properties", {}).items()
    own = {name for name, field in properties if not field.get("description", "").startswith(without_effect)}
    return own.union(*(fields(document, part) for part in schema.get("allOf", [])))


def set_parameters(page: Page, **values: object) -> None:
    for name, value in values.items():
        field = page.get_by_label(name, exact=True)
        expect(field).to_be_attached()  # the page has been told the server's parameters
        if not field.is_visible():
            page.locator(".settings details", has=field).locator("summary").click()
        if field.evaluate("field => field.tagName") == "SELECT":
            field.select_option(str(value))
        else:
            fill(field, value)


def fill(field: sync_api.Locator, value: object) -> None:
    """Playwright appends to a number in Firefox."""
    field.fill("")
    field.fill(str(value))


def finished_answer(page: Page, number: int = -1) -> sync_api.Locator:
    """An answer, after its last token."""
    answer = page.get_by_role("article", name="Answer").nth(number)
    expect(answer.get_by_role("button", name="Regenerate")).to_be_enabled()
    return answer


def test_an_answer_is_that_of_the_api(page: Page, server: Server) -> None:
    set_parameters(page, temperature=0, max_tokens=24)
    question = "What is the capital of Japan?"
    say(page, question)
    answer = finished_answer(page)
    body = {"messages": [{"role": "user", "content": question}], "temperature": 0, "max_tokens": 24}
    expected = ask(server, "/v1/chat/completions", body).json["choices"][0]["message"]["content"]
    expect(answer.locator(".markdown")).to_have_text(expected)
    expect(answer.locator(".figures")).to_contain_text("tokens/s")
    expect(answer.locator(".figures")).to_contain_text("first token")


def test_a_stopped_answer_keeps_its_text_and_ends_in_the_server(page: Page, server: Server) -> None:
    set_parameters(page, ignore_eos="true", temperature=0)
    say(page, "Tell me a long story.")
    answer = page.get_by_role("article", name="Answer")
    expect(answer.locator(".markdown")).to_contain_text(" ")
    expect(answer.locator(".figures")).to_contain_text("tokens/s")
    expect(page.locator(".server")).to_contain_text("1 running")
    page.get_by_role("button", name="Stop").click()
    expect(finished_answer(page).locator(".figures")).to_contain_text("stopped")
    assert len(answer.locator(".markdown").inner_text()) > 0
    expect(page.locator(".server")).to_contain_text("0 running")


def test_edited_and_regenerated_messages_are_versions(page: Page) -> None:
    set_parameters(page, max_tokens=4, temperature=1, seed=1)
    say(page, "Say one.")
    first = finished_answer(page).locator(".markdown").inner_text()

    set_parameters(page, seed=2)
    page.get_by_role("button", name="Regenerate").click()
    answer = finished_answer(page)
    expect(answer.locator(".versions")).to_contain_text("2 of 2")
    assert answer.locator(".markdown").inner_text() != first
    answer.get_by_role("button", name="Previous version").click()
    expect(page.get_by_role("article", name="Answer").locator(".markdown")).to_have_text(first)

    question = page.get_by_role("article", name="You")
    question.get_by_role("button", name="Edit").click()
    page.get_by_label("Edit message").fill("Say two.")
    page.get_by_label("Edit message").press("Control+Enter")
    finished_answer(page)
    expect(question.locator(".markdown")).to_have_text("Say two.")
    expect(question.locator(".versions")).to_contain_text("2 of 2")
    question.get_by_role("button", name="Previous version").click()
    expect(question.locator(".markdown")).to_have_text("Say one.")
    expect(page.get_by_role("article", name="Answer").locator(".versions")).to_contain_text("1 of 2")

    page.evaluate(WAIT_FOR_WRITES)
    page.reload()
    expect(page.get_by_role("article", name="You").locator(".markdown")).to_have_text("Say one.")
    expect(page.get_by_role("article", name="Answer").locator(".markdown")).to_have_text(first)


def test_several_answers_at_once_are_versions(page: Page) -> None:
    set_parameters(page, max_tokens=6, n=3)
    say(page, "Name a colour.")
    expect(finished_answer(page).locator(".versions")).to_contain_text("1 of 3")
    page.get_by_role("button", name="Next version").click()
    expect(page.get_by_role("article", name="Answer").locator(".versions")).to_contain_text("2 of 3")


def test_answers_match_a_schema_or_an_expression(page: Page) -> None:
    set_parameters(page, max_tokens=60, temperature=0)
    page.get_by_label("Answer format").select_option(label="JSON schema")
    schema = {"type": "object", "properties": {"age": {"type": "integer", "maximum": 99}}, "required": ["age"]}
    editor = page.get_by_label("JSON schema", exact=True)
    editor.fill("{")
    expect(editor).to_have_attribute("aria-invalid", "true")
    expect(page.get_by_role("button", name="Send")).to_be_disabled()
    editor.fill(json.dumps(schema))
    say(page, "How old is Tim?")
    jsonschema.validate(json.loads(finished_answer(page).locator(".markdown").inner_text()), schema)

    page.get_by_label("Answer format").select_option(label="Regular expression")
    page.get_by_label("Regular expression", exact=True).fill("[0-9]{3}-[0-9]{2}")
    say(page, "Write a number.")
    expect(finished_answer(page).locator(".markdown")).to_have_text(re.compile(r"^\d{3}-\d{2}$"))


def test_editors_colour_their_text(page: Page) -> None:
    page.get_by_label("Answer format").select_option(label="JSON schema")
    editor, copy = page.get_by_label("JSON schema", exact=True), page.locator(".highlighted pre").first
    editor.fill('{"type": "string", "maxLength": 12, ' + '"x": 1, ' * 200)  # wrong, and longer than the editor
    expect(copy.locator(".s-key").first).to_have_text('"type"')
    expect(copy.locator(".s-number").first).to_have_text("12")
    size = "element => [element.scrollHeight, element.clientWidth, element.clientHeight]"
    assert copy.text_content() == editor.input_value() + "\n"
    assert copy.evaluate(size) == editor.evaluate(size), "a letter and its coloured copy are at the same place"
    editor.evaluate("element => element.scrollTop = 60")
    page.wait_for_function("document.querySelector('.highlighted pre').scrollTop === 60")
    page.get_by_label("Answer format").select_option(label="Regular expression")
    page.get_by_label("Regular expression", exact=True).fill("[a-z]{2}")
    expect(copy.locator("span")).to_have_text(["[a-z]", "{2}"])


def test_tokens_show_their_alternatives(page: Page) -> None:
    set_parameters(page, max_tokens=8, temperature=0)
    page.get_by_label("Ask for tokens").check()
    fill(page.get_by_label("Alternatives of each token"), 3)
    say(page, "Count to three.")
    answer = finished_answer(page)
    text = answer.locator(".markdown").inner_text()
    answer.get_by_role("button", name="Tokens").click()
    tokens = answer.locator(".token")
    assert "".join(tokens.all_text_contents()).split() == text.split()

    tokens.first.hover()
    card = answer.locator(".card")
    expect(card.locator("tbody tr")).to_have_count(3)
    expect(card.locator(".taken")).to_have_count(1)
    assert all(share.endswith(" %") for share in card.locator("tbody td:nth-child(2)").all_text_contents())

    answer.locator(".token-text").focus()
    page.keyboard.press("End")
    page.keyboard.press("ArrowLeft")
    expect(card.locator("caption")).to_have_text(f"Token {tokens.count() - 1}")


def test_every_parameter_is_offered_with_its_range(page: Page, server: Server) -> None:
    document = ask(server, "/api-doc/openapi.json").json
    for button, schema in [("Completion", "CompletionRequest"), ("Chat", "ChatRequest")]:
        page.get_by_role("button", name=button).click()
        expected = fields(document, {"$ref": f"#/components/schemas/{schema}"}) - ELSEWHERE
        expect(page.locator(".parameter > label")).to_have_count(len(expected))
        assert set(page.locator(".parameter > label").all_text_contents()) == expected

    expect(page.locator(".field", has=page.get_by_label("top_p", exact=True))).to_contain_text("from 0 to 1")
    set_parameters(page, top_p=2)
    expect(page.get_by_label("top_p", exact=True)).to_have_attribute("aria-invalid", "true")
    expect(page.locator(".composer .error")).to_have_text("top_p must be from 0 to 1")
    expect(page.get_by_role("button", name="Send")).to_be_disabled()


def test_a_completion_continues_its_text(page: Page, server: Server) -> None:
    page.get_by_role("button", name="Completion").click()
    set_parameters(page, max_tokens=5, temperature=0)
    say(page, "The capital of France is")
    finished_answer(page)
    page.get_by_role("button", name="Continue").click()
    finished_answer(page, 1)
    body = {"prompt": "The capital of France is", "max_tokens": 10, "temperature": 0}
    expected = ask(server, "/v1/completions", body).json["choices"][0]["text"]
    assert "".join(page.locator(".assistant .plain").all_text_contents()) == expected


def test_the_model_calls_a_tool_and_reads_its_result(page: Page) -> None:
    set_parameters(page, max_tokens=60, temperature=0)
    page.locator("summary", has_text="Tools").click()
    page.get_by_role("button", name="Insert an example").click()
    page.get_by_label("Tool choice").select_option("get_weather")
    page.get_by_label("Several calls").uncheck()
    say(page, "How is the weather in Rome?")
    answer = finished_answer(page)
    expect(answer.locator(".call summary")).to_have_text("Call of get_weather")
    assert set(json.loads(answer.locator(".call code").last.inner_text())) == {"place"}
    page.get_by_label("Tool choice").select_option("none")
    page.get_by_label("Result of get_weather").fill("Sunny, 30 degrees")
    page.get_by_role("button", name="Send results").click()
    assert finished_answer(page, 1).locator(".markdown").inner_text()


def test_the_shown_code_gives_the_shown_answer(page: Page, tmp_path: Path) -> None:
    set_parameters(page, max_tokens=12, temperature=0, top_k=5)
    say(page, "It's \"quoted\" — what's $HOME?")
    shown = finished_answer(page).locator(".markdown").inner_text()
    page.keyboard.press("Alt+C")
    dialog = page.get_by_role("dialog")
    command = dialog.locator("pre").inner_text()
    printed = subprocess.run(
        ["bash", "-c", command], capture_output=True, text=True, check=True, timeout=TIMEOUT_S
    ).stdout
    assert json.loads(printed)["choices"][0]["message"]["content"].split() == shown.split()
    dialog.get_by_role("button", name="Python").click()
    expect(dialog.locator("pre")).to_contain_text("import OpenAI")
    program = tmp_path / "program.py"
    program.write_text(dialog.locator("pre").inner_text())
    printed = subprocess.run(
        [sys.executable, program], capture_output=True, text=True, check=True, timeout=TIMEOUT_S
    ).stdout
    assert printed.split() == shown.split()


def test_the_theme_follows_the_system_until_one_is_chosen(page: Page, browser: Browser) -> None:
    needs_chromium(browser, "emulate a dark system")

    def brightness() -> int:
        colour = page.evaluate("getComputedStyle(document.body).backgroundColor")
        return sum(int(part) for part in re.findall(r"\d+", colour)[:3])

    light, dark = 3 * 200, 3 * 60
    page.emulate_media(color_scheme="light")
    assert brightness() > light
    page.emulate_media(color_scheme="dark")
    assert brightness() < dark
    page.get_by_label("Theme").select_option("light")
    assert brightness() > light
    page.reload()
    assert brightness() > light


def test_a_narrow_screen_has_everything(page: Page) -> None:
    page.set_viewport_size({"width": 360, "height": 740})
    page.get_by_role("button", name="Settings").click()
    set_parameters(page, max_tokens=8)
    page.keyboard.press("Escape")
    expect(page.get_by_label("max_tokens", exact=True)).to_be_hidden()
    say(page, "Hello there")
    finished_answer(page)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    page.get_by_role("button", name="History").click()
    expect(page.get_by_role("navigation").get_by_role("button", name="Hello there", exact=True)).to_be_visible()


def test_a_history_of_2000_messages_opens_at_its_end_and_goes_on(page: Page, server: Server) -> None:
    page.evaluate(STORE_LONG_CONVERSATION)
    page.goto(f"{server.url}/playground#long")
    page.reload()
    messages = page.locator(".message")  # finding thousands of elements by their role takes seconds
    expect(messages.last).to_contain_text("message 1999")
    expect(messages.last).to_be_in_viewport()
    assert messages.count() < 200
    set_parameters(page, truncate_prompt_tokens=100, max_tokens=4)
    say(page, "Still here?")
    finished_answer(page)
    more = page.locator(".more")
    while (num_shown := messages.count()) < 2002:
        more.click()
        expect(messages).not_to_have_count(num_shown)
    expect(more).to_have_count(0)
    assert messages.count() == 2002
    expect(messages.first).to_contain_text("message 0")


def test_a_conversation_can_be_deleted(page: Page) -> None:
    set_parameters(page, max_tokens=2)
    say(page, "Forget this")
    finished_answer(page)
    page.get_by_role("button", name="Delete Forget this").click()
    expect(page.get_by_role("article")).to_have_count(0)
    page.reload()
    expect(page.get_by_label("temperature", exact=True)).to_be_visible()
    expect(page.get_by_text("Forget this")).to_have_count(0)


def answers_with(page: Page, *deltas: dict[str, object], **fields: list[object]) -> None:
    """Let the model answer with these deltas, and each chunk's choice have its value of the fields."""
    chunks: list[dict[str, Any]] = [{"choices": [{"index": 0, "delta": delta}]} for delta in deltas]
    for name, values in fields.items():
        for chunk, value in zip(chunks, values, strict=True):
            chunk["choices"][0][name] = value
    chunks.append({"choices": [{"index": 0, "delta": {}, "finish_reason": "stop"}]})
    body = "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(content_type="text/event-stream", body=body))


def test_accepted_drafts_are_marked_and_counted_by_their_place(page: Page) -> None:
    texts = ["One", " two", " three", " four"]
    logprobs = [{"content": [{"token": text, "logprob": -0.1, "top_logprobs": []}]} for text in texts]
    first, last = {"token_index": 0, "verified": 3, "accepted": 2}, {"token_index": 3, "verified": 1, "accepted": 0}
    drafts = [[first], None, None, [last]]
    answers_with(page, *({"content": text} for text in texts), logprobs=logprobs, drafts=drafts)
    page.get_by_label("Ask for tokens").check()
    with page.expect_request("**/v1/chat/completions") as request:
        say(page, "Count.")
    assert request.value.post_data_json["return_drafts"] is True
    answer = finished_answer(page)
    answer.get_by_role("button", name="Tokens").click()
    expect(answer.locator(".token.drafted")).to_have_text(["One", " two"])
    rows = answer.locator(".acceptance tbody tr")
    expect(rows).to_have_text(
        [re.compile(r"1\D*2\D*1 \(50 %\)"), re.compile(r"2\D*1\D*1 \(100"), re.compile(r"3\D*1\D*0 \(0")]
    )
    answer.locator(".token").nth(1).hover()
    expect(answer.locator(".card caption")).to_have_text("Token 2, drafted at place 2")
    answer.locator(".token").nth(2).hover()
    expect(answer.locator(".card caption")).to_have_text("Token 3")


def test_what_the_model_writes_never_becomes_html(page: Page) -> None:
    hostile = (
        "<script>window.hacked = 1</script>\n\n<img src=x onerror='window.hacked = 1'>\n\n"
        "inline <b onclick='window.hacked = 1'>bold</b> and [a link](javascript:window.hacked=1) and "
        "![an image](http://192.0.2.1/x.png) and [a data link](data:text/html,<script>1</script>)\n\n"
        "```html\n<iframe src='http://192.0.2.1/'></iframe>\n```\n"
    )
    elements_before = page.locator("script, img, iframe").count()
    answers_with(page, {"content": hostile[:9]}, {"content": hostile[9:]}, {"reasoning_content": hostile})
    say(page, hostile)
    answer = finished_answer(page)
    for text in [
        "<script>window.hacked = 1</script>",
        "<b onclick='window.hacked = 1'>",
        "<iframe",
        "[image: an image]",
    ]:
        expect(answer).to_contain_text(text)
    assert page.locator("script, img, iframe").count() == elements_before
    assert page.evaluate("window.hacked") is None
    links = [link.get_attribute("href") for link in answer.locator("a").all()]
    assert set(links) == {"http://192.0.2.1/x.png"}


def test_the_browser_refuses_html_from_the_page(browser: Browser, server: Server) -> None:
    page = open_page(browser)
    page.goto(server.url)
    expect(page.locator("#draft")).to_be_visible()
    with pytest.raises(sync_api.Error, match=r"TrustedHTML|blocked by CSP"):
        page.evaluate("document.body.innerHTML = '<b>text</b>'")
    page.close()


def test_thoughts_are_folded_and_markdown_is_shown(page: Page) -> None:
    table = "| x | y |\n|---|--:|\n| 1 | 2 |"
    code = "```python\nprint('&amp;')\n```"
    text = f"# Title\n\n1. *one*\n2. **two** `a<b`\n\n{table}\n\n{code}\n\n- [x] done &amp; dusted"
    answers_with(page, {"reasoning_content": "Let me see."}, {"content": text})
    say(page, "Show me.")
    answer = finished_answer(page)
    expect(answer.get_by_text("Let me see.")).to_be_hidden()
    answer.get_by_text("Thoughts").click()
    expect(answer.get_by_text("Let me see.")).to_be_visible()
    expect(answer.get_by_role("heading", name="Title")).to_be_visible()
    expect(answer.locator("ol > li")).to_have_text(["one", "two a<b"])
    expect(answer.locator("td")).to_have_text(["1", "2"])
    expect(answer.locator("pre")).to_have_text("print('&amp;')")
    expect(answer.locator("ul > li")).to_have_text(re.compile("done & dusted"))


def test_a_refused_request_says_why(page: Page) -> None:
    page.get_by_label("Answer format").select_option(label="Regular expression")
    page.get_by_label("Regular expression", exact=True).fill("(")
    with page.expect_response("**/v1/chat/completions") as response:
        say(page, "Hello")
    assert response.value.status == 400
    expect(finished_answer(page).locator(".error")).to_have_text(response.value.json()["error"]["message"])


def test_a_server_with_keys_is_asked_with_the_key(page: Page) -> None:
    def answer(route: sync_api.Route) -> None:
        if route.request.headers.get("authorization") == "Bearer secret":
            route.continue_()
        else:
            route.fulfill(status=401, json={"error": {"message": "no API key was given"}})

    page.route("**/v1/chat/completions", answer)
    set_parameters(page, max_tokens=3)
    say(page, "Hello")
    dialog = page.get_by_role("dialog", name="API key")
    dialog.get_by_label("API key", exact=True).fill("secret")
    dialog.get_by_role("button", name="Save").click()
    page.get_by_role("button", name="Regenerate").click()
    expect(finished_answer(page).locator(".figures")).to_contain_text("tokens/s")
    page.keyboard.press("Alt+C")
    expect(page.get_by_role("dialog").locator("pre")).to_contain_text("Bearer $PENSTOCK_API_KEY")
    assert "secret" not in page.get_by_role("dialog").inner_text()
    assert page.evaluate("JSON.stringify(localStorage)").find("secret") < 0


def test_an_answer_goes_on_while_another_conversation_is_shown(page: Page) -> None:
    set_parameters(page, max_tokens=400, ignore_eos="true")
    say(page, "First question")
    expect(page.get_by_role("article", name="Answer").locator(".markdown")).to_contain_text(" ")  # it has begun
    page.keyboard.press("Alt+N")
    set_parameters(page, max_tokens=4)
    say(page, "Second question")
    expect(finished_answer(page).locator(".figures")).to_contain_text("4 tokens")
    page.get_by_role("navigation").get_by_role("button", name="First question", exact=True).click()
    expect(page.get_by_role("article", name="You")).to_contain_text("First question")
    expect(finished_answer(page).locator(".figures")).to_contain_text("400 tokens")


def test_the_keyboard_is_enough(page: Page) -> None:
    set_parameters(page, ignore_eos="true")
    page.locator("#draft").focus()
    page.keyboard.type("One line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("and another")
    page.keyboard.press("Enter")
    expect(page.get_by_role("article", name="You").locator(".markdown")).to_contain_text("and another")
    expect(page.get_by_role("article", name="Answer").locator(".figures")).to_contain_text("tokens/s")
    page.keyboard.press("Escape")
    expect(finished_answer(page).locator(".figures")).to_contain_text("stopped")
    page.get_by_role("article", name="Answer").get_by_role("button", name="Copy message").focus()
    page.keyboard.press("?")
    dialog = page.get_by_role("dialog", name="Keyboard")
    expect(dialog).to_be_visible()
    page.keyboard.press("Escape")
    expect(dialog).to_have_count(0)


@needs_node
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_axe_finds_nothing(browser: Browser, server: Server, scheme: Literal["light", "dark"]) -> None:
    needs_chromium(browser, "bypass a content security policy")
    install(SOURCE)
    axe = (SOURCE / "node_modules" / "axe-core" / "axe.min.js").read_text()
    # axe needs a page without a content security policy.
    page = open_page(browser, viewport={"width": 1400, "height": 850}, color_scheme=scheme, bypass_csp=True)
    page.goto(f"{server.url}/playground")
    expect(page.get_by_label("temperature", exact=True)).to_be_visible()
    page.evaluate(axe)

    def violations() -> list[tuple[str, str]]:
        found = page.evaluate("axe.run()")["violations"]
        return [(violation["id"], node["html"]) for violation in found for node in violation["nodes"]]

    page.locator("details summary").evaluate_all("summaries => summaries.forEach(s => { s.parentElement.open = true })")
    page.get_by_label("Ask for tokens").check()
    set_parameters(page, max_tokens=8, top_p=3)
    assert violations() == []
    set_parameters(page, top_p="")
    page.locator("#draft").click()
    expect(page.locator(".server dl")).to_be_hidden()
    page.get_by_label("System message").fill("Answer briefly.")
    say(page, "Hello")
    finished_answer(page).get_by_role("button", name="Tokens").click()
    page.locator(".token").first.hover()
    expect(page.locator(".card")).to_be_visible()
    assert violations() == []
    for name in ["Code", "Key", "Help"]:
        page.get_by_role("button", name=name, exact=True).click()
        assert violations() == []
        page.keyboard.press("Escape")
    answers_with(
        page, {"reasoning_content": "Hm.", "content": "# Title\n\n> quote\n\n| x |\n|---|\n| `1` |\n\n```\ncode\n```"}
    )
    say(page, "Show me")
    finished_answer(page).get_by_text("Thoughts").click()
    page.set_viewport_size({"width": 360, "height": 740})
    assert violations() == []
    page.close()


def test_the_page_works_over_plain_http_from_another_machine(browser: Browser, server: Server) -> None:
    page = open_page(browser)
    page.goto(server.url.replace("127.0.0.1", REMOTE))
    assert page.evaluate("isSecureContext") is False
    set_parameters(page, max_tokens=4)
    say(page, "Hello from afar")
    finished_answer(page)
    copy = page.get_by_role("article", name="You").get_by_role("button", name="Copy message")
    page.clock.install()
    page.clock.pause_at(page.evaluate("Date.now()") + 60_000)  # the button says what it has done for a short time only
    copy.click()
    expect(copy).to_have_text("Copied")
    page.clock.run_for(2000)
    expect(copy).to_have_text("Copy")
    page.locator("#draft").focus()
    page.keyboard.press("Control+V")
    expect(page.locator("#draft")).to_have_value("Hello from afar")
    page.close()


def test_an_answer_that_a_reload_cut_off_says_so(page: Page) -> None:
    set_parameters(page, ignore_eos="true", max_tokens=6000)  # its first part is stored long before its last token
    say(page, "Tell me a long story.")
    expect(page.get_by_role("article", name="Answer").locator(".figures")).to_contain_text("tokens/s")
    page.evaluate(WAIT_FOR_STORED_TEXT)
    page.reload()
    answer = finished_answer(page)
    # Firefox tells the page that the connection broke before it reloads the page.
    expect(answer.locator(".figures")).to_contain_text(re.compile("incomplete|failed"))
    assert answer.locator(".markdown").inner_text()
    expect(page.locator(".server")).to_contain_text("0 running")
