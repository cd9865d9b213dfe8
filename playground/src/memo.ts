// A component that renders again only when one of its properties is another value.

import { Component, type ComponentChildren, type FunctionComponent, h } from "preact";

export function memo<P extends object>(render: FunctionComponent<P>): FunctionComponent<P> {
  class Memo extends Component<P> {
    override shouldComponentUpdate(next: Readonly<P>): boolean {
      const [mine, others] = [this.props, next] as Record<string, unknown>[];
      return [...Object.keys(mine!), ...Object.keys(others!)].some((name) => mine![name] !== others![name]);
    }
    override render(): ComponentChildren {
      return h(render, this.props as P);
    }
  }
  return Memo as unknown as FunctionComponent<P>;
}
