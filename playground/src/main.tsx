import { render } from "preact";
import { Page } from "./page.tsx";
import { begin } from "./state.ts";
import "./page.css";

render(<Page />, document.getElementById("app")!);
void begin();
