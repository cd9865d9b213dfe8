// Conversations in the browser's own database. Heads are read at once, whole conversations when they are opened.

import { type Conversation } from "./conversation.ts";

export type Head = Pick<Conversation, "id" | "title" | "mode" | "changed">;

const HEADS = "heads";
const CONVERSATIONS = "conversations";

let opened: Promise<IDBDatabase> | undefined;

function database(): Promise<IDBDatabase> {
  opened ??= new Promise((resolve, reject) => {
    const request = indexedDB.open("penstock-playground", 1);
    request.onupgradeneeded = () => {
      for (const name of [HEADS, CONVERSATIONS]) request.result.createObjectStore(name, { keyPath: "id" });
    };
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
  return opened;
}

function done<T>(request: IDBRequest<T>): Promise<T> {
  return new Promise((resolve, reject) => {
    request.onsuccess = () => resolve(request.result);
    request.onerror = () => reject(request.error);
  });
}

async function written(change: (heads: IDBObjectStore, conversations: IDBObjectStore) => void): Promise<void> {
  const transaction = (await database()).transaction([HEADS, CONVERSATIONS], "readwrite");
  change(transaction.objectStore(HEADS), transaction.objectStore(CONVERSATIONS));
  await new Promise<void>((resolve, reject) => {
    transaction.oncomplete = () => resolve();
    transaction.onabort = () => reject(transaction.error);
  });
}

export function headOf({ id, title, mode, changed }: Conversation): Head {
  return { id, title, mode, changed };
}

/** The newest first. */
export async function heads(): Promise<Head[]> {
  const all: Head[] = await done((await database()).transaction(HEADS).objectStore(HEADS).getAll());
  return all.sort((one, other) => other.changed - one.changed);
}

export async function read(id: string): Promise<Conversation | undefined> {
  return done((await database()).transaction(CONVERSATIONS).objectStore(CONVERSATIONS).get(id));
}

export function save(conversation: Conversation): Promise<void> {
  return written((heads, conversations) => {
    heads.put(headOf(conversation));
    conversations.put(conversation);
  });
}

export function remove(id: string): Promise<void> {
  return written((heads, conversations) => {
    heads.delete(id);
    conversations.delete(id);
  });
}

export function removeAll(): Promise<void> {
  return written((heads, conversations) => {
    heads.clear();
    conversations.clear();
  });
}
