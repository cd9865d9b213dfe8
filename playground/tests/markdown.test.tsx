import assert from "node:assert/strict";
import { test } from "node:test";
import { type ComponentChildren, type VNode, isValidElement } from "preact";
import { Markdown, decoded, safe } from "../src/markdown.tsx";

/** The elements and texts that a component makes, such as `p(one strong(two))`. */
function outline(children: ComponentChildren): string {
  if (Array.isArray(children)) return children.map(outline).filter(Boolean).join(" ");
  if (children === null || children === undefined || typeof children === "boolean") return "";
  if (!isValidElement(children)) return String(children);
  const { type, props } = children as VNode<{ children?: ComponentChildren; text?: string }>;
  if (typeof type === "string") return `${type}(${outline(props.children)})`;
  return outline(type.name === "Code" ? `code[${props.text}]` : rendered(type as never, props));
}

function rendered(type: new (props: object) => { render: () => ComponentChildren }, props: object): ComponentChildren {
  const isClass = typeof type.prototype?.render === "function";
  if (!isClass) return (type as unknown as (props: object) => ComponentChildren)(props);
  const component = new type(props);
  Object.assign(component, { props });
  return component.render();
}

const shown = (text: string) => outline(<Markdown text={text} />);

test("markdown becomes elements, and HTML in it becomes text", () => {
  assert.equal(shown("one **two**"), "div(p(one  strong(two)))");
  assert.equal(shown("<script>x</script>"), "div(<script>x</script>)");
  assert.equal(shown("a <b>c</b>"), "div(p(a  <b> c </b>))");
  assert.equal(shown("```js\n<i>\n```"), "div(code[<i>])");
});

test("only links to the web and to mail can be followed", () => {
  assert.equal(safe("https://example.org/a"), "https://example.org/a");
  assert.equal(safe("mailto:a@example.org"), "mailto:a@example.org");
  for (const href of ["javascript:alert(1)", " JavaScript:alert(1)", "data:text/html,x", "vbscript:x", "/path", "x", "file:///etc/passwd"]) {
    assert.equal(safe(href), undefined, href);
  }
});

test("character references are decoded, unknown ones are kept", () => {
  assert.equal(decoded("a &amp; b &lt;c&gt; &#65;&#x42; &unknown; &#0; &#99999999;"), "a & b <c> AB &unknown; &#0; &#99999999;");
});

test("text that nests too deeply is shown as it is", () => {
  for (const deep of [">".repeat(200) + " x", "- ".repeat(300) + "x", "*".repeat(3000) + "x"]) {
    assert.ok(shown(deep).includes("x"));
  }
  assert.match(shown(">".repeat(200) + " x"), /^div\(p\(>>>/);
});

test("a table and a list keep their cells and numbers", () => {
  assert.equal(shown("| a | b |\n|---|---|\n| 1 | 2 |"), "div(div(table(thead(tr(th(a) th(b))) tbody(tr(td(1) td(2))))))");
  assert.match(shown("3. x\n4. y"), /^div\(ol\(li\(.*x.*\) li\(.*y.*\)\)\)$/);
});
