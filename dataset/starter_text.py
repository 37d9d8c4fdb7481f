"""Everyday sentences in English and Chinese, for the starter's tokenizer only: no model is trained on them.

The starter's sums use few words. These lines add the common ones, so that other short prompts do not fall apart into
bytes.
"""

ENGLISH = """\
Hello, how are you today? I am fine, thank you, and you?
Who are you? I am a small language model trained by reinforcement learning.
What can you do? I can answer short questions about numbers and explain how I think.
Please write a short story about a cat, a dog and a bird in the garden.
Tell me why the sky is blue and why the sea looks green in the evening.
Explain the difference between a list and a dictionary in Python, with a simple example.
How do I learn to cook rice, bread, soup and vegetables at home?
The weather is warm this week, but it will be cold and rainy next month.
Could you help me plan a trip to the city for three days with my family and friends?
My favourite book is about science, history, music and the people of the world.
Which language should I study first if I want to become a programmer?
A good answer is correct, clear, short, useful, honest and polite.
The policy writes a response, the reward model gives a score, and the advantage says which tokens become more likely.
We sample several answers for the same prompt, compare them, and update the weights with a small learning rate.
First think step by step, then give the final answer in one sentence.
If you do not know something, say that you are not sure; never make things up.
There are many ways to solve a problem, and some of them are better than others.
Yes, that is right. No, that is wrong. Maybe, it depends on what you mean.
Every morning she reads the news, drinks a cup of coffee and walks to work.
He said that they were going to school because their teacher asked them to come early.
When was the first computer made, where was it used, and how large was it?
Could this be done faster, with less memory, without any loss of quality?
Write code that opens a file, reads each line, counts the words and prints the result.
Of all the questions people ask, those about health, money, time and love come up most often.
It has been a long day, so let us rest now and continue our work tomorrow.
Can you translate this text into Chinese? Can you summarize the following paragraph for me?
The train leaves at noon from the north station and arrives at night in the south.
Someone has found an error in the data: the number should be higher than the one before.
Please check the list again, remove what is not needed, and keep only the most important points.
Children like to play games after school, while their parents would like to see them do more homework.
"""

CHINESE = """\
你好，您好，早上好，晚上好，谢谢，对不起，没关系，再见，请问，可以，不可以，好的，当然
我，你，他，她，它，我们，你们，他们，自己，大家，别人，朋友，家人，孩子，老师，学生，医生，先生
是，不是，有，没有，在，不在，会，不会，能，不能，要，不要，想，知道，不知道，觉得，认为，喜欢，希望，需要
这，那，这个，那个，这些，那些，这里，那里，什么，怎么，怎样，为什么，哪里，哪个，谁，多少，几个，如何
的，了，着，过，吗，呢，吧，啊，和，与，或，但是，因为，所以，如果，虽然，然后，而且，还是，就是，只是，对于，关于
一个，两个，三个，一些，很多，所有，每个，其他，第一，第二，最后，一样，不同，非常，已经，正在，一定，可能，应该
今天，明天，昨天，现在，时间，时候，早上，下午，晚上，星期，去年，今年，明年，春天，夏天，秋天，冬天
中国，北京，上海，世界，国家，城市，学校，公司，家里，地方，天气，下雨，太阳，月亮，天空，海洋，山，水，火，土
吃饭，喝水，睡觉，学习，工作，运动，旅行，看书，写字，说话，听音乐，唱歌，跳舞，做饭，买东西，回家，上学，上班
大，小，多，少，高，低，长，短，快，慢，新，旧，好，坏，对，错，冷，热，远，近，容易，困难，重要，简单，复杂，美丽，高兴
人工智能，机器学习，深度学习，强化学习，语言模型，神经网络，数据，算法，训练，模型，策略，奖励，优势，参数，概率
介绍，解释，说明，比较，总结，翻译，推荐，列出，描述，分析，设计，计算，证明，例子，方法，步骤，原因，结果，问题，回答
文章，故事，诗歌，小说，电影，音乐，历史，文化，科学，技术，数学，物理，化学，生物，经济，社会，教育，健康，环境
计算机，程序，代码，函数，变量，文件，网络，手机，软件，系统，信息，内容，语言，中文，英文，文字，句子，单词
猫，狗，鸟，鱼，花，草，树，苹果，香蕉，米饭，面条，蔬菜，牛奶，茶，咖啡，桌子，椅子，房子，门，车，飞机，火车
请你详细介绍一下，请用一句话回答，请举一个例子，请写一首诗，请帮我，请告诉我，你是谁，你能做什么，我不太清楚，很高兴见到你
"""

COPIES = 4  # a pair must be frequent to be merged; each line counts this often


def general_lines():
    """The lines above, each `COPIES` times."""
    return COPIES * (ENGLISH + CHINESE).splitlines()
