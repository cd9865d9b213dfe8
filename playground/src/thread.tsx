// The shown path of the conversation. A long one begins with its newest messages.

import { useSignal } from "@preact/signals";
import { useEffect, useLayoutEffect, useRef } from "preact/hooks";
import { MessageView } from "./message.tsx";
import { current, isRunning, modelNames, path, runningIds, settings } from "./state.ts";

const SHOWN_AT_FIRST = 100;
const SHOWN_MORE = 400;
/** Within this distance of the end, the thread follows the answer. */
const NEAR_END_PX = 80;

export function Thread() {
  const limit = useSignal(SHOWN_AT_FIRST);
  const area = useRef<HTMLDivElement>(null);
  const content = useRef<HTMLDivElement>(null);
  const follows = useRef(true);
  const lastTop = useRef(0);
  const { id, mode } = current.value;
  const places = path.value;
  const numHidden = Math.max(0, places.length - limit.value);

  useEffect(() => {
    limit.value = SHOWN_AT_FIRST;
    follows.current = true;
    area.current!.scrollTop = area.current!.scrollHeight;
  }, [id]);
  // Also when messages get their real height, which the browser estimates until they come into view.
  useLayoutEffect(() => {
    const toEnd = () => {
      if (area.current && follows.current) area.current.scrollTop = area.current.scrollHeight;
    };
    const observer = new ResizeObserver(toEnd);
    observer.observe(content.current!);
    return () => observer.disconnect();
  }, []);
  const onScroll = () => {
    const { scrollTop, scrollHeight, clientHeight } = area.current!;
    if (scrollTop < lastTop.current) follows.current = false;
    if (scrollHeight - scrollTop - clientHeight < NEAR_END_PX) follows.current = true;
    lastTop.current = scrollTop;
  };
  const showMore = () => {
    follows.current = false;
    limit.value += SHOWN_MORE;
  };
  return (
    <div class="thread" ref={area} onScroll={onScroll} tabIndex={0} role="log" aria-label="Conversation" aria-busy={isRunning.value}>
      <div ref={content}>
        {numHidden > 0 && (
          <button type="button" class="more" onClick={showMore}>{`Show earlier messages (${numHidden})`}</button>
        )}
        {places.length === 0 && (
          <div class="empty">
            <p class="model">{settings.value.model || modelNames.value[0]}</p>
            <p>{mode === "chat" ? "Ask the model something." : "Write a text that the model continues."}</p>
          </div>
        )}
        {places.slice(numHidden).map(({ message, siblings }, index) => (
          <MessageView
            key={message.id}
            message={message}
            mode={mode}
            siblings={siblings.length > 1 ? siblings : ALONE}
            isLast={numHidden + index === places.length - 1}
            isRunning={runningIds.value.has(message.id)}
          />
        ))}
      </div>
    </div>
  );
}

/** One value for all messages without siblings, so that they are not rendered again. */
const ALONE: never[] = [];
